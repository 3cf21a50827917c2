// Shows the rows of the device table that contain every word of the filter field.
document.addEventListener("DOMContentLoaded", function () {
  const field = document.getElementById("device-filter");
  if (!field) return;
  const rows = [...document.querySelectorAll("#device-table tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const count = document.getElementById("device-count");
  function apply() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, n) => {
      row.hidden = !words.every((word) => texts[n].includes(word));
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = shown + " of " + rows.length + " devices";
  }
  field.addEventListener("input", apply);
  apply();
});
