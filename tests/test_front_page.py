"""The front page: pictures and tables come from the committed results, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import readme_figures as figures
from benchmarks import readme_pictures as pictures
from benchmarks import sweep_table
from tests.command_line import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


README = read("README.md")


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def printed_run(name: str) -> str:
    """The closing summary of one run, as it stands in the results file: it ends with the run's name."""
    text = read("benchmarks/results/hardware_truth_training.txt")
    summary = re.search(rf"^truemfu\n((?:  .+\n)+?)  {re.escape(name)}: [\d.]+ ms$", text, re.MULTILINE)
    assert summary is not None
    return summary[1]


@pytest.mark.parametrize("scheme", figures.SCHEMES)
def test_the_picture_is_what_its_script_makes(scheme: str) -> None:
    path = f"docs/pictures/waterfall-{scheme}.svg"
    assert read(path) == figures.draw(figures.read_waterfall(), scheme)
    assert path in README


@pytest.mark.parametrize("scheme", figures.SCHEMES)
@pytest.mark.parametrize("name", pictures.DRAWN)
def test_other_pictures_are_what_their_script_makes(name: str, scheme: str) -> None:
    path = f"docs/pictures/{name}-{scheme}.svg"
    assert read(path) == pictures.DRAWN[name](scheme)
    assert path in README


def test_the_heat_map_has_every_experiment_of_the_sweep() -> None:
    cells = pictures.sweep_cells()
    assert sum(len(found) for found in cells.values()) == len(
        list((ROOT / "benchmarks/results/sweep_h200/results").glob("*.json"))
    )


def test_the_page_of_the_sweep_has_the_figures_that_its_script_prints() -> None:
    page = " ".join(read("docs/sweep.md").split())
    assert [row for row in sweep_table.table() if row not in read("docs/sweep.md")] == []
    lines = sweep_table.compared()
    ordered, named = [line for line in lines if "over book-keeping" in line], " ".join(lines)
    extremes = [re.search(r": ([\d.]+), (.+) at (.+)", line) for line in (ordered[0], ordered[-1])]
    ratios = [f"{float(found[1]):.2f}" for found in extremes if found is not None]
    assert f"{ratios[0]} to {ratios[1]} times as long as it at equal points" in page
    for found in extremes:
        assert found is not None
        assert f"{found[2]} at {found[3]}" in page
    shown = re.findall(
        r"([\d.]+ to [\d.]+) for (book-keeping|DP-SGD|ghost clipping|fast gradient clipping)", page
    )
    assert len(shown) == 4
    assert all(re.search(rf"{name}: [^:]+: [^:]+: executed work {work}", named) for work, name in shown)


def drawn_points(name: str) -> list[float]:
    """The percentages that a picture shows, in its order."""
    shown = re.findall(r">([−+]?\d+\.\d) %<", read(f"docs/pictures/{name}-light.svg"))
    return [float(points.replace("−", "-")) for points in shown]


def test_what_the_waterfall_shows_adds_up_from_the_peak_to_hfu_and_mfu_as_the_run_printed_them() -> None:
    (peak, *to_hfu), after = drawn_points("waterfall")[:3], drawn_points("waterfall")[3:]
    hfu, *to_mfu, mfu = after
    assert peak == 100
    assert round(peak + sum(to_hfu), 1) == hfu
    assert round(hfu + sum(to_mfu), 1) == mfu
    assert all(points < 0 for points in (*to_hfu, *to_mfu))  # nothing to explain: no gain, and HFU above MFU
    printed = printed_run(figures.RUN)
    assert re.search(rf"executed, by counters .+ HFU {hfu:.1f}%, ", printed)
    assert f"where the peak went     {mfu:.1f} %  the model's FLOPs" in printed
    assert f"to {hfu} % HFU and {mfu} % MFU" in README


def test_the_parts_that_the_report_shows_are_the_whole_peak() -> None:
    mfu, hfu, *parts = drawn_points("report")
    assert round(sum(parts), 1) == 100
    assert all(points > 0 for points in parts)
    assert f"MFU, median            {mfu:.1f}%" in printed_run(figures.RUN)
    assert f"HFU, median            {hfu:.1f}%" in printed_run(figures.RUN)


def test_the_accuracy_table_is_that_of_the_results_with_date_and_versions() -> None:
    assert figures.accuracy_table() in README
    results = figures.accuracy_results()
    assert len(results["tools"]) == 11
    below = " ".join(README.partition("## Accuracy")[2].partition("\n## ")[0].split()).lower()
    named = [f"{name} {version}" for name, version in results["versions"].items() if name != "truemfu"]
    assert [text for text in (*named, results["date"], results["machine"]) if text not in below] == []


def test_the_overhead_is_that_of_the_newest_results() -> None:
    assert figures.overhead_table() in read("docs/monitor.md")
    source, runs = figures.overhead_runs()
    limited_by_gpu = runs["ReferenceModel 8x1024 eager"]["overhead"]
    launch_bound = runs["LlamaForCausalLM 4x512 eager"]["own_costs"]
    line = " ".join(README.partition("## Overhead")[2].partition("\n## ")[0].split())
    low, high = (figures.percent(end) for end in limited_by_gpu["interval_95"])
    assert f"{figures.percent(limited_by_gpu['median'])} % (95 %: {low} … {high} %)" in line
    assert f"{launch_bound['mean_us']:.0f} µs of the training thread" in line
    for page in (line, read("docs/monitor.md").partition("## Overhead")[2]):
        assert source.split()[0] in page


def test_the_front_page_is_short_and_in_order() -> None:
    assert len(README.splitlines()) <= 150
    parts = [
        "<picture>",
        "pip install",
        "```diff",
        "| counter |",
        "| | H100",
        "## Overhead",
        "make demo",
        "make test",
    ]
    places = [README.index(part) for part in [*parts, "    src/truemfu/", "## Documentation"]]
    assert places == sorted(places)
    added = re.findall(r"^\+(.+)$", README.partition("```diff\n")[2].partition("```")[0], re.MULTILINE)
    assert len(added) == 3


def test_the_tree_on_the_front_page_names_folders_that_are_there() -> None:
    tree = re.search(r"^    src/truemfu/\n((?:      .+\n)+)", README, re.MULTILINE)
    assert tree is not None
    lines = tree[1].splitlines()
    assert len(lines) < 20
    package, outer, shown = ROOT / "src" / "truemfu", "", set()
    for line in lines:
        name, phrase = line.split(maxsplit=1)
        outer = name if line.startswith(" " * 6 + name) else outer
        path = package / name if name == outer else package / outer / name
        assert path.is_dir(), f"{path} is not a folder"
        assert phrase
        shown.add(path)
    folders = {path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= shown


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: str) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", read(page))
    for target in ("".join(pair) for pair in targets):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor and path.suffix == ".md":  # a picture's is for the site: #only-dark
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page}: {target}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_on_the_page_of_commands(command: str) -> None:
    assert f"| `truemfu {command}" in read("docs/commands.md")
