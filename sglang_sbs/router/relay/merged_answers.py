"""Merges responses: several single requests into one, and prefill's logprobs into decode's.
Indices, sums and order are those of SGLang (prompt by prompt, sample by sample)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_sbs.router.relay import engine_json
from sglang_sbs.router.relay.engine_json import Spliced
from sglang_sbs.router.requests import raw_json
from sglang_sbs.router.requests.plan import RequestPlan
from sglang_sbs.router.requests.raw_json import JsonError, Raw

_INPUT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_FLAT_INPUT = "input_top_logprobs_"
"""Prefix of the fields for ``return_flat_raw_top_logprobs``, which replace ``input_top_logprobs``:
values and ids as flat lists or base64, their types, shape and number of leading nulls."""
_ECHOED = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Parallel lists in OpenAI's completion logprobs."""
_EXTENSION, _SPEC, _OUTPUT_IDS = "sglext", "spec_tokens_details", "output_ids"
"""SGLang's extensions of OpenAI's responses, and their members that differ from choice to
choice."""
_EVENT_END = b"\n\n"


def sse(value: Any) -> list[bytes | memoryview]:
    """Return the bytes of a server-sent event with ``value`` as JSON, in pieces so that long values
    are not copied."""
    first, *others = engine_json.dumped_pieces(value)
    if not others:
        return [b"".join((b"data: ", first, _EVENT_END))]
    return [b"data: ", first, *others, _EVENT_END]


def merge_input_logprobs(output: dict[str, Any], prefill: dict[str, Any]) -> None:
    """Put prefill's input logprobs in front of decode's, in place; decode has no input logprobs."""
    ours, theirs = output.get("meta_info"), prefill.get("meta_info")
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return
    for key in _INPUT_LOGPROBS:
        values = theirs.get(key)
        if engine_json.is_list(values):
            ours[key] = engine_json.one_after_the_other(values, ours.get(key))
    for key, value in theirs.items():
        if key.startswith(_FLAT_INPUT):
            ours[key] = value  # decode's describe an empty prompt


def merge_echoed_logprobs(output: dict[str, Any], prefill: dict[str, Any]) -> None:
    """Put the prompt's logprobs into the first choice of ``/v1/completions`` with ``echo``, in
    place. Prefill's choice has the prompt's tokens and then the one it sampled, which decode's has
    as well. In a stream only the first event carries the prompt."""
    choice, source = _first_choice(output), _first_choice(prefill)
    ours, theirs = choice.get("logprobs"), source.get("logprobs")
    if not isinstance(theirs, dict):
        return
    usage = prefill.get("usage")
    sampled = usage.get("completion_tokens") if isinstance(usage, dict) else None
    leave_out = sampled if isinstance(sampled, int) else 1
    merged = dict(ours) if isinstance(ours, dict) else {}
    for key in _ECHOED:
        values = theirs.get(key)
        if engine_json.is_list(values) and values:
            merged[key] = engine_json.one_after_the_other(values, merged.get(key), leave_out)
    choice["logprobs"] = merged


def _first_choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def restore_rid(output: dict[str, Any], rid: str, client_rid: str) -> None:
    """Replace the router's rid by the client's own, in place."""
    meta = output.get("meta_info")
    if isinstance(meta, dict) and meta.get("id") == rid:
        meta["id"] = client_rid
    if output.get("id") == rid:
        output["id"] = client_rid


class UsageSum:
    """Sums OpenAI's ``usage`` over units, counting each prompt once and each completion."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.value: dict[str, Any] | None = None

    def add(self, unit: int, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        if self.value is None:
            self.value = {}
        counts_prompt = unit % self._samples == 0
        for key, amount in usage.items():
            if key in ("prompt_tokens", "prompt_tokens_details") and not counts_prompt:
                # The first sample of the prompt counts, and its event may come later.
                self.value.setdefault(key, 0 if isinstance(amount, int) else None)
                continue
            self.value[key] = _sum(self.value.get(key), amount)
        prompt, completion = (self.value.get(f"{n}_tokens", 0) for n in ("prompt", "completion"))
        self.value["total_tokens"] = prompt + completion


def _sum(left: Any, right: Any) -> Any:
    """Add numbers, add objects key by key, and take over anything else."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _sum(left.get(key), right.get(key)) for key in {**left, **right}}
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return right if left is None else left


class ExtensionMerger:
    """Merges SGLang's ``sglext`` objects: members of the first unit that has them, but ids of the
    output, and with several samples the counts of speculative decoding, of each choice."""

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        self._of_units: dict[int, dict[str, Any]] = {}

    def add(self, unit: int, extension: Any) -> None:
        """Add a unit's object (parsed, or ``Raw`` JSON). Raises: JsonError, it is invalid."""
        if isinstance(extension, Raw) and not raw_json.is_null(extension):
            extension = engine_json.opened(memoryview(extension))
        if isinstance(extension, dict):
            self._of_units[unit] = extension

    def value(self) -> dict[str, Any] | None:
        """Return the merged object; ``None`` if no unit has any."""
        found = [self._of_units.get(unit, {}) for unit in self._plan.units]
        merged: dict[str, Any] = {}
        for extension in found:
            merged = extension | merged
        if self._plan.samples > 1 and merged.get(_SPEC) is not None:
            merged[_SPEC] = [each[_SPEC] for each in found if each.get(_SPEC) is not None]
        if engine_json.is_list(merged.get(_OUTPUT_IDS)):
            ids = (extension.get(_OUTPUT_IDS) for extension in found)
            merged[_OUTPUT_IDS] = engine_json.spliced_lists(
                choice if engine_json.is_list(choice) else [[]] for choice in ids
            )
        return merged or None


class NoAnswer(ValueError):
    """A unit's response does not have SGLang's format; ``args`` are the unit and the reason."""


def merge_answers(
    plan: RequestPlan, answers: Sequence[bytes | bytearray]
) -> list[bytes | memoryview]:
    """Merge the complete responses of all units, in order, into one body. Long values are not
    copied, so it is returned in pieces. Raises: NoAnswer, a response is not a JSON object or its
    choices are invalid."""
    usage = UsageSum(plan.samples)
    choices: list[list[bytes | Raw]] = []
    extensions = ExtensionMerger(plan)
    first: dict[str, Raw] = {}
    for unit, answer in enumerate(answers):
        try:
            members = raw_json.decoded(raw_json.MEMBERS, answer)
            if not first:
                first = members
            if plan.kind != "generate":
                choices += _choices_of(unit, members.get("choices"))
                usage.add(unit, raw_json.value_of(members.get("usage") or b"null"))
                extensions.add(unit, members.get(_EXTENSION))
        except JsonError as error:
            raise NoAnswer(unit, str(error)) from error
    if plan.kind == "generate":
        return Spliced([answer] for answer in answers).pieces
    merged: dict[str, Any] = {**first, "choices": Spliced(choices)}
    if usage.value is not None:
        merged["usage"] = usage.value
    if (extension := extensions.value()) is not None:
        merged[_EXTENSION] = extension
    return engine_json.dumped_pieces(merged)


def _choices_of(unit: int, choices: Raw | None) -> list[list[bytes | Raw]]:
    """Return each of a response's choices in pieces of JSON, with the unit as its ``index``. Empty
    for ``None`` or null. Raises: JsonError, they are not a list of objects."""
    if choices is None or raw_json.is_null(choices):
        return []
    index = b"%d" % unit
    found: list[list[bytes | Raw]] = []
    for choice in raw_json.decoded(raw_json.OBJECTS, choices):
        members: dict[str, Raw | bytes] = {**choice} | {"index": index}
        found.append([b"{", *raw_json.member_pieces(members.items()), b"}"])
    return found


class StreamMerger:
    """Merges the streams of several units into one: indices, one id, one usage, one ``[DONE]``."""

    def __init__(self, plan: RequestPlan, response_id: str) -> None:
        self._plan = plan
        self._response_id = response_id
        self._usage = UsageSum(plan.samples)
        self._usage_event: dict[str, Any] | None = None
        self._extensions = ExtensionMerger(plan)
        self._extension_event: dict[str, Any] | None = None

    def event(self, unit: int, value: dict[str, Any]) -> Sequence[bytes | memoryview]:
        """Return the client's pieces for one event of one unit; empty if there is nothing to send
        yet."""
        if self._plan.single or "error" in value:
            return sse(value)
        if self._plan.kind == "generate":
            return sse(value | {"index": unit})
        value["id"] = self._response_id
        choices = value.get("choices")
        if not choices and value.get("usage") is not None:
            self._usage.add(unit, value["usage"])
            self._usage_event = value
            return ()
        if not choices and value.get(_EXTENSION) is not None:
            self._extensions.add(unit, value[_EXTENSION])
            self._extension_event = value
            return ()
        for choice in choices or []:
            if isinstance(choice, dict):
                choice["index"] = unit
        return sse(value)

    def end(self) -> bytes:
        """Return the last events: SGLang's extensions, the usage, and ``[DONE]``."""
        pieces: list[bytes | memoryview] = []
        if (event := self._extension_event) is not None:
            pieces += sse(event | {_EXTENSION: self._extensions.value()})
        if (event := self._usage_event) is not None:
            pieces += sse(event | {"usage": self._usage.value})
        return b"".join((*pieces, b"data: [DONE]\n\n"))
