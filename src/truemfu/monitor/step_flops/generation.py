"""The FLOPs of `generate`, and the share of the memory's bandwidth that decoding needs.

A pass of a dense decoder over q positions of B rows, with c positions cached, multiplies

    B·q·(2·elements of the layers' matrices)  +  B·(2·elements of the head)  +  B·pairs·(FLOPs of a pair)

with q·(c + q) pairs, or the causal ones by the convention. The three factors are those that all observed
passes of a model determine exactly; where passes contradict each other (a sliding window, images beside
some prompts of one length) only observed calls are known. MBU is what each decoding step must read (every
weight once, and keys and values of the positions so far) over the time of decoding at the device's
bandwidth. It is left out where not every position is multiplied by every matrix (a mixture of experts,
quantised weights): what was read is then unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...convention import Convention
from ...flops import OBSERVED, Linear, solve
from ..timing.clock import seconds_between
from ..watching.generation import Generation, Pass
from .known import FORM, Unknown

_MOST_ROWS = 512
NOT_SEEN = (
    "not all forward passes of generate were seen: it compiled the model, has an assistant, or decodes in "
    "its own way"
)
NOT_KNOWN = "the observed calls of generate do not determine the FLOPs of this one"


@dataclass(frozen=True)
class GenerationCount:
    """FLOPs of one call of `generate`."""

    prefill: int
    decode: int
    by_dtype: Mapping[str, int]
    method: str


class _Form:
    """What the observed passes of one model determine."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], int] = {}
        self.dtypes: set[str] = set()
        self.linear: Linear | None = None
        self.is_contradicted = False
        """Whether passes of equal sizes had different FLOPs: what they do is not known by their sizes."""
        self.longest = 0
        """Of the observed passes: positions cached and computed."""


class GenerationFlops:
    """Takes calls in observed steps, and answers for all; lives on the row side."""

    def __init__(self, convention: Convention, bandwidth_bytes_per_s: float | None) -> None:
        self._is_causal, self._bandwidth = convention.attention == "causal", bandwidth_bytes_per_s
        self._forms: dict[int, _Form] = {}

    def take(self, generations: Sequence[Generation], observed: Mapping[int, Counter[str]]) -> None:
        """Learn from the calls of an observed step: the FLOPs of their passes by number and dtype."""
        for generation in generations:
            form = self._forms.setdefault(generation.model, _Form())
            for each in generation.passes:
                if each.number and len(form.rows) < _MOST_ROWS:
                    found = observed.get(each.number, Counter())
                    form.dtypes.update(found)
                    row, total = self._row(each), found.total()
                    form.is_contradicted |= form.rows.setdefault(row, total) != total
                    form.longest = max(form.longest, each.end)
            if form.is_contradicted:
                form.linear = None
            elif form.rows:
                form.linear = solve(3, ((list(row), (flops,)) for row, flops in form.rows.items()))

    def answer(
        self, generation: Generation, observed: Mapping[int, Counter[str]] | None
    ) -> GenerationCount | Unknown:
        """The FLOPs of a call: its own if its step was observed, else by the form."""
        if not generation.is_whole:
            return Unknown(NOT_SEEN)
        prefill, decode = parts(generation.passes)
        if observed is not None and all(each.number for each in generation.passes):
            counts = [
                sum((observed.get(p.number, Counter()) for p in part), Counter())
                for part in (prefill, decode)
            ]
            return GenerationCount(counts[0].total(), counts[1].total(), counts[0] + counts[1], OBSERVED)
        form = self._forms.get(generation.model)
        found = None if form is None else [self._by_form(form, part) for part in (prefill, decode)]
        if form is None or found is None or found[0] is None or found[1] is None:
            return Unknown(NOT_KNOWN)
        (dtype,) = form.dtypes
        return GenerationCount(found[0], found[1], {dtype: found[0] + found[1]}, FORM)

    def _by_form(self, form: _Form, passes: Sequence[Pass]) -> int | None:
        if form.linear is None or len(form.dtypes) != 1:
            return None
        if any(each.end > form.longest for each in passes):
            return None  # a limit, such as a sliding window, would not have shown
        sums = [sum(column) for column in zip(*map(self._row, passes), strict=True)] or [0, 0, 0]
        found = form.linear.integers(sums)
        return None if found is None else found[0]

    def _row(self, each: Pass) -> tuple[int, int, int]:
        times, queries = each.times, each.queries
        pairs = times * queries * (each.cached + queries) + queries * (times * (times - 1) // 2)
        if self._is_causal:
            pairs -= times * (queries * (queries - 1) // 2)
        return each.rows * times * queries, each.rows * times, each.rows * pairs

    def bytes_read(self, generation: Generation) -> float | None:
        """What the decoding steps of a call must read; None if unknown."""
        form, cache = self._forms.get(generation.model), generation.cache
        if form is None or form.linear is None or cache is None or not generation.is_whole:
            return None
        per_position = form.linear.integers([1, 1, 0])
        if per_position is None or per_position[0] != 2 * generation.weights.matrix_elements:
            return None
        decode = parts(generation.passes)[1]
        found = float(generation.weights.bytes * sum(each.times for each in decode))
        for layer, layers in cache.items():
            positions = sum(
                min(each.cached + each.queries + n, layer.positions)
                for each in decode
                for n in range(each.times)
            )
            found += layers * layer.bytes_per_position * positions
        return found

    def metrics(
        self, generations: Sequence[Generation], observed: Mapping[int, Counter[str]] | None
    ) -> dict[str, float | str]:
        """The `perf/generate/` metrics of a step's calls together."""
        row: dict[str, float | str] = {}
        times = [None if g.end is None else seconds_between(g.begin, g.end) for g in generations]
        if all(seconds is not None for seconds in times):
            row["perf/generate/time"] = sum(seconds or 0.0 for seconds in times)
        tokens = [generation.tokens for generation in generations]
        if all(each is not None for each in tokens):
            row["perf/generate/tokens"] = sum(each or 0 for each in tokens)
        counts = [self.answer(generation, observed) for generation in generations]
        known = [count for count in counts if isinstance(count, GenerationCount)]
        if len(known) == len(counts):
            row["perf/generate/prefill_flops"] = sum(count.prefill for count in known)
            row["perf/generate/decode_flops"] = sum(count.decode for count in known)
            row["perf/generate/method"] = known[0].method
        else:
            row["perf/generate/unknown"] = next(c.reason for c in counts if isinstance(c, Unknown))
        read = [self.bytes_read(generation) for generation in generations]
        decoding = [seconds_between(g.decode, g.end) if g.decode and g.end else None for g in generations]
        decode_s = sum(seconds or 0.0 for seconds in decoding)
        if decode_s and None not in read and None not in decoding:
            row["perf/generate/read_bytes"] = read_bytes = sum(each or 0.0 for each in read)
            if self._bandwidth is not None:
                row["perf/generate/mbu"] = read_bytes / decode_s / self._bandwidth
        return row


def parts(passes: Sequence[Pass]) -> tuple[Sequence[Pass], Sequence[Pass]]:
    """The passes of the prompt, and from the first of one position on those that decode."""
    first = next((at for at, each in enumerate(passes) if at and each.queries == 1), len(passes))
    return passes[:first], passes[first:]
