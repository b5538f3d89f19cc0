"""One episode of an agent: its requests become a tree of turns, and the tree becomes training samples.

If a request continues an earlier answer, its prompt consists of the tokens up to that answer plus the encoded new
messages; tokens that the policy sampled are never encoded again. Histories are compared in a normal form, because
clients send answers back in slightly different form. A request that cannot be continued in this way is rendered from
scratch and begins a new sample, and the cause is counted. Each sampled token is trained on at most once: a later branch
has the turns that it shares with an earlier one as context only.

Requests may overlap. All code here runs in the event loop that answers the requests, with two exceptions: long
conversations are tokenized in a thread, and the policy is called in the event loop that created the session.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os.path
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll.agentic.endpoint.records import Answerer, ModelAnswer, ModelRequest, Pause, RequestRefused, Tell, no_pause
from roll.agentic.endpoint.tool_calls import Parser
from roll.agentic.endpoint.turns import TurnReader, message_of, with_system_folded
from roll.agentic.episode import ManagerSettings, Message, Policy, SampledTurn, TurnRecord
from roll.data.chat import ChatTurns, Conversation, TemplateRefused, TurnTemplate
from roll.data.encoding import decoded, tokenise
from roll.data.records import Sample, joined_routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTS = (
    "cancelled",
    "new_samples/history",
    "new_samples/template",
    "new_samples/tools",
    "untrained/aborted",
    "untrained/other_model",
    "untrained/too_late",
    "untrained/unread",
)
"""Counts that every episode reports, even if they are 0, so that means over episodes are right."""
LONG_PROMPT = 2**12
"""Length in characters or token ids above which a prompt is tokenized in a thread, so that other requests do not wait.
"""
EarlierReasoning = Literal["keep", "template"]
THOUGHT = "KeptThought{number}Qz"
"""Placeholder for reasoning text, to test if the chat template keeps it."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of the sessions of one environment."""

    limits: ManagerSettings
    """Limits of lengths. `max_steps` limits the number of answers, `prompt_length` the first prompt of a conversation.
    """
    parser: Parser
    """Function that parses tool calls, from `tool_calls.py`."""
    earlier_reasoning: EarlierReasoning = "keep"
    """`keep`: the policy's reasoning from earlier turns stays in its context. `template`: the chat template decides. If
    it removes the reasoning, each message of the user may begin a new sample."""
    untrained_models: frozenset[str] = frozenset()
    """Model names for which the policy answers, but is not trained on the answers."""
    ignore_response_format: bool = False
    """True to answer requests for structured output without enforcing the structure; False to refuse them."""


@dataclass(eq=False)
class _Turn:
    """A node of the tree: a sampled answer, and the prompt tokens between its parent's answer and itself."""

    number: int
    """Number of the turn in the episode, from 0, in the order in which sampling began."""
    parent: _Turn | None
    """Turn whose answer this one continues; None for a root."""
    tools: str
    """Digest of the tools of its conversation."""
    asked: tuple[str, ...]
    """Normal forms of the messages after the parent's answer; for a root, of all messages before the answer."""
    read: np.ndarray
    """int32: prompt tokens after the parent's answer; for a root, its whole prompt."""
    sampled: SampledTurn
    answers: frozenset[str]
    """Normal forms in which a client may send the answer back."""
    message: Message
    """The answer as a message for the chat template, including its reasoning."""
    conversation: Conversation | None
    """Conversation up to the answer; None if the prompt was a text or token ids."""
    answer_id: str
    text: str
    prompt: str | None = None
    """Prompt, if it was a text; None if it was a conversation or token ids."""
    untrained: str | None = None
    """Reason why the turn is not trained on; None if it is."""
    begun_for: str | None = None
    """Reason why it begins a new sample although its messages have an earlier answer; None if they have none."""
    out_of_room: bool = False
    """True if the answer was cut off, or could not be continued, because the context was full."""
    children: list[_Turn] = field(default_factory=list)

    @property
    def path(self) -> list[_Turn]:
        """Turns from the root to this one."""
        turns: list[_Turn] = []
        turn: _Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens up to the end of this turn, int32."""
        return np.concatenate([piece for turn in self.path for piece in (turn.read, turn.sampled.token_ids)])


@dataclass(frozen=True)
class _Place:
    """The place of a request in the tree. Fields are those of the `_Turn` that will answer it."""

    parent: _Turn | None
    tools: str
    asked: tuple[str, ...]
    read: np.ndarray
    conversation: Conversation | None
    cause: str | None
    """See `_Turn.begun_for`."""

    @property
    def token_ids(self) -> np.ndarray:
        """The whole prompt, int32."""
        return self.read if self.parent is None else np.concatenate([self.parent.token_ids, self.read])


class EpisodeSession(Answerer):
    """An episode: answers requests with the policy, and turns the answers into training samples."""

    keeps_answers = True

    def __init__(
        self,
        template: TurnTemplate,
        decoder: PreTrainedTokenizerBase,
        policy: Policy,
        settings: SessionSettings,
    ) -> None:
        """Begin an episode. ``policy`` will be called in the event loop that is running now."""
        self._template = template
        self._decoder = decoder
        self._policy = policy
        self._settings = settings
        self._reader = TurnReader(template, decoder, settings.parser)
        self._home = asyncio.get_running_loop()
        self._turns: list[_Turn] = []
        self._sampled = 0
        self._roots: list[_Turn] = []
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.closed = False
        self.failure: BaseException | None = None
        """Error raised by the policy or the endpoint; the episode has then failed."""

    @property
    def room(self) -> int:
        return self._settings.limits.sequence_length

    @property
    def tokens(self) -> int:
        """Number of tokens of all turns, prompts and answers."""
        return sum(len(turn.read) + len(turn.sampled.token_ids) for turn in self._turns)

    async def respond(self, request: ModelRequest, *, tell: Tell | None = None, pause: Pause = no_pause) -> ModelAnswer:
        """Sample the answer to a request and record it. Raises `RequestRefused`.

        ``pause`` is awaited after sampling, before the answer is parsed and recorded. ``tell`` is not called: nothing
        is sent that is not recorded.
        """
        limits = self._settings.limits
        self._require_open()
        if not self._settings.ignore_response_format:
            request.require_no_form("ask for it in the prompt, or set `ignore_response_format`")
        place = await self._found(request)
        self._require_open()
        prompt = place.token_ids
        self._require_room(request, place, len(prompt))
        if place.cause is not None:
            self._counts[f"new_samples/{place.cause}"] += 1
        longest = limits.response_limit(len(prompt))
        if request.max_tokens is not None:
            longest = min(longest, request.max_tokens)
        number, self._sampled = self._sampled, self._sampled + 1
        prompt.flags.writeable = False
        sampled = await self._sample(prompt, number, longest, request.stop, pause)
        answer = self._reader.answer(
            request,
            prompt,
            sampled,
            answer_id=uuid.uuid4().hex,
            created=int(time.time()),
            calls_id=str(number),  # a template may write the ids, so they must be the same in each run of the episode
        )
        message = message_of(answer)
        turn = _Turn(
            number=number,
            parent=place.parent,
            tools=place.tools,
            asked=place.asked,
            read=place.read,
            sampled=sampled,
            answers=_answer_forms(message, request.stop),
            message=message,
            conversation=place.conversation,
            answer_id=answer.id,
            text=answer.text,
            prompt=request.prompt if isinstance(request.prompt, str) else None,
            begun_for=place.cause,
            untrained="other_model" if request.model in self._settings.untrained_models else None,
            out_of_room=sampled.finish_reason == "length"
            and len(prompt) + len(sampled.token_ids) >= limits.sequence_length,
        )
        self._turns.append(turn)
        (self._roots if turn.parent is None else turn.parent.children).append(turn)
        return answer

    async def count_tokens(self, request: ModelRequest) -> int:
        return len((await self._found(request)).token_ids)

    def leave_out(self, answer_id: str, cause: str) -> None:
        """Exclude an answer from training because it did not reach the agent, unless a later request continues it."""
        for turn in self._turns:
            if turn.answer_id == answer_id and not turn.children and turn.untrained is None:
                turn.untrained = cause

    def close(self) -> None:
        """Refuse further requests. Answers that are being sampled will not be recorded."""
        self.closed = True

    def samples(self, score: float, reward: float) -> list[Sample]:
        """Return the training samples of the episode: one for each branch that has turns to train on.

        ``score``: the environment's score; ``reward``: the score with penalties, which is credited to the last token of
        the last turn. The list is empty if there is nothing to train on. Raises the error in `failure`, if any.
        """
        if self.failure is not None:
            raise self.failure
        trained = [turn for turn in self._turns if turn.untrained is None and len(turn.sampled.token_ids)]
        if not trained:
            return []
        last = max(trained, key=lambda turn: turn.number)
        left, made = set(trained), list[tuple[int, Sample]]()
        for leaf in sorted((turn for turn in self._turns if not turn.children), key=lambda turn: turn.number):
            path = leaf.path
            while path and path[-1] not in left:
                path.pop()
            if path:
                made.append((path[-1].number, self._sample_of(path, left, last, score, reward)))
                left.difference_update(path)
        # Sorted by their last turns, so that the last sample ends with the last token of the episode.
        return [sample for _, sample in sorted(made, key=lambda each: each[0])]

    def turns(self, reward: float) -> list[TurnRecord]:
        """Return the turns in readable form. The last turn gets ``reward``, all others get 0."""
        numbered = sorted(self._turns, key=lambda turn: turn.number)
        return [
            TurnRecord(
                observation=decoded(turn.read, self._decoder),
                response=self._decoder.decode(turn.sampled.token_ids.tolist(), skip_special_tokens=True),
                reward=reward if turn is numbered[-1] else 0.0,
                action_is_valid=True,
                frame=None,
            )
            for turn in numbered
        ]

    def metrics(self) -> dict[str, float]:
        """Return counts: turns, tokens, new samples by cause, untrained tokens by cause, and cancelled calls."""
        counts = self._counts.copy()
        for turn in self._turns:
            if turn.untrained is not None:
                counts[f"untrained/{turn.untrained}"] += len(turn.sampled.token_ids)
        capped = sum(turn.sampled.finish_reason == "length" for turn in self._turns)
        return {name: float(count) for name, count in sorted(counts.items())} | {
            "turns": float(len(self._turns)),
            "conversations": float(len(self._roots)),
            "capped_turns": capped / max(1, len(self._turns)),
            "tokens": float(sum(len(turn.sampled.token_ids) for turn in self._turns)),
        }

    # The place of a request in the tree

    def _require_open(self) -> None:
        if self.closed:
            raise RequestRefused("the episode of this key is over", status=409, code="episode_over")
        most = self._settings.limits.max_steps
        if self._sampled >= most:
            used_up = f"the episode has had its {most} answers (`max_steps`); end it"
            raise RequestRefused(used_up, code="max_steps_exceeded")

    async def _found(self, request: ModelRequest) -> _Place:
        """Return the place of a request, without changing the tree. Long requests are processed in a thread."""
        length = len(request.prompt or ()) + sum(len(message["content"]) for message in request.messages)
        return await asyncio.to_thread(self._place, request) if length > LONG_PROMPT else self._place(request)

    def _place(self, request: ModelRequest) -> _Place:
        if request.prompt is not None:
            return self._place_of_prompt(request.prompt)
        forms = normal_forms(request.messages)
        tools = _digest(_canonical(list(request.tools)))
        found = self._deepest(request, forms, tools)
        if found is None:
            # Assistant messages in the first request of an episode are examples, not history.
            is_told = bool(self._turns) and any(message["role"] == "assistant" for message in request.messages)
            others = is_told and self._deepest(request, forms, None) is not None
            cause = ("tools" if others else "history") if is_told else None
            return self._begin(request.messages, request, tools, forms, cause)
        turn, place = found
        following = request.messages[place:]
        if not self._keeps_thoughts(turn, request):
            return self._begin(_recorded(turn, request.messages), request, tools, forms, "template")
        assert turn.conversation is not None  # `_deepest` returns only turns with a conversation
        conversation, calls = turn.conversation.branch(), turn.message.get("tool_calls", ())
        try:
            read = with_system_folded(
                lambda messages: conversation.glue(turn.sampled.token_ids, messages, calls), following, begins=False
            )
        except TemplateRefused:
            return self._begin(_recorded(turn, request.messages), request, tools, forms, "template")
        return _Place(turn, tools, forms[place:], read, conversation, None)

    def _begin(
        self, messages: Sequence[Message], request: ModelRequest, tools: str, forms: tuple[str, ...], cause: str | None
    ) -> _Place:
        conversation = self._reader.begun(messages, request)
        return _Place(None, tools, forms, conversation.prompt_token_ids, conversation, cause)

    def _deepest(self, request: ModelRequest, forms: tuple[str, ...], tools: str | None) -> tuple[_Turn, int] | None:
        """Return the deepest turn that the messages continue, and the number of messages up to and with its answer.

        If several turns have equal answers, prefer the one whose tool calls have the same ids, then the latest.
        ``tools``: digest of the tools that the turn must have; None: any.
        """
        left = [(turn, 0) for turn in self._roots if turn.conversation is not None and tools in (turn.tools, None)]
        found: list[tuple[int, bool, int, _Turn]] = []
        while left:
            turn, start = left.pop()
            end = start + len(turn.asked)
            if end + 1 < len(forms) and forms[start:end] == turn.asked and forms[end] in turn.answers:
                same_ids = _ids(request.messages[end]) == _ids(turn.message)
                found.append((end + 1, same_ids, turn.number, turn))
                left += [(child, end + 1) for child in turn.children]
        if not found:
            return None
        place, *_, turn = max(found, key=lambda each: each[:3])
        return turn, place

    def _keeps_thoughts(self, turn: _Turn, request: ModelRequest) -> bool:
        """Return False if the chat template leaves out earlier reasoning that is in the policy's context."""
        template = self._template
        if self._settings.earlier_reasoning == "keep" or not isinstance(template, ChatTurns):
            return True
        words: list[str] = []

        def marked(message: Message) -> Message:
            if not message.get("reasoning_content"):
                return message
            words.append(THOUGHT.format(number=len(words)))
            return {**message, "reasoning_content": words[-1]}

        messages = [marked(message) for message in _recorded(turn, request.messages)]
        if not words:
            return True
        shielded = template.contents.shielded
        try:
            text = template.render(shielded(messages), shielded(list(request.tools)))
        except TemplateRefused:
            return False
        return all(word in text for word in words)

    def _place_of_prompt(self, prompt: str | tuple[int, ...]) -> _Place:
        """Return the place of a prompt that is no conversation: after the longest earlier turn that it begins with."""
        found: tuple[int, _Turn] | None = None
        for turn in self._turns:
            if turn.conversation is not None or (turn.prompt is None) is isinstance(prompt, str):
                continue
            before: Any = turn.token_ids.tolist() if turn.prompt is None else turn.prompt + turn.text
            size = len(before)
            is_begun = prompt.startswith(before) if isinstance(prompt, str) else list(prompt[:size]) == before
            if is_begun and len(prompt) > size and (found is None or size >= found[0]):
                found = size, turn
        if found is None:
            return _Place(None, "", (), self._reader.encoded(prompt), None, None)
        turn, rest = found[1], prompt[found[0] :]
        if isinstance(rest, str):
            return _Place(turn, "", (), self._read_behind(turn, rest), None, None)
        self._reader.require_known(rest)
        return _Place(turn, "", (), np.array(rest, dtype=np.int32), None, None)

    def _read_behind(self, turn: _Turn, text: str) -> np.ndarray:
        """Return the tokens (int32) of a text behind an answer.

        The text of an answer lacks the stop string and the end token that the policy wrote. If ``text`` begins with
        them, they are left out, because they are in the context already.
        """
        sampled = turn.sampled.token_ids
        written = self._decoder.decode(sampled.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        left_out = written.removeprefix(turn.text) if written.startswith(turn.text) else ""
        repeated = os.path.commonprefix([text, left_out])
        # A part may be there by chance: `</answer>` does not repeat `</tool>`.
        rest = text.removeprefix(repeated) if repeated == left_out or repeated.isspace() else text
        read = tokenise([rest], self._decoder)[0]
        has_end = len(sampled) and int(sampled[-1]) in self._template.special_ids
        return read[1:] if has_end and len(read) and read[0] == sampled[-1] else read

    def _require_room(self, request: ModelRequest, place: _Place, tokens: int) -> None:
        limits = self._settings.limits
        begins = place.parent is None and not any(message["role"] == "assistant" for message in request.messages)
        longest, key = limits.sequence_length - 1, "sequence_length"
        if begins and limits.prompt_limit < longest:
            longest, key = limits.prompt_limit, "prompt_length"
        if 0 < tokens <= longest:
            return
        if tokens == 0:
            raise RequestRefused("the prompt is empty; write something", field="prompt")
        if place.parent is not None:
            place.parent.out_of_room = True
        raise RequestRefused(
            f"the prompt has {tokens} tokens, and `{key}` leaves room for {longest}; send fewer messages, or raise the "
            "key in the configuration of the run",
            code="context_length_exceeded",
        )

    # Sampling

    async def _sample(
        self, prompt: np.ndarray, number: int, max_new_tokens: int, stop: tuple[str, ...], pause: Pause
    ) -> SampledTurn:
        call = self._policy(prompt, turn=number, max_new_tokens=max_new_tokens, stop_strings=stop)
        try:
            if asyncio.get_running_loop() is self._home:
                sampled = await call
            else:
                sampled = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._home))
            await pause()
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise RequestRefused(f"the policy failed: {error}", status=503, code="policy_failed") from error
        lengths = len(sampled.token_ids), len(sampled.logprobs), len(sampled.versions)
        if lengths[0] > max_new_tokens or len(set(lengths)) > 1:
            self.failure = ValueError(
                f"turn {number}: the policy answered {lengths[0]} tokens with {lengths[1]} log-probabilities and "
                f"{lengths[2]} versions; it was asked for at most {max_new_tokens} of each"
            )
            raise RequestRefused(str(self.failure), status=503, code="policy_failed")
        cause = "aborted" if sampled.finish_reason == "abort" else "too_late" if self.closed else None
        if cause is not None:
            self._counts[f"untrained/{cause}"] += lengths[0]
            status = 409 if self.closed else 503
            raise RequestRefused("the answer was stopped before its end; ask again", status=status, code=cause)
        return sampled

    # Samples

    def _sample_of(self, path: Sequence[_Turn], new: set[_Turn], last: _Turn, score: float, reward: float) -> Sample:
        """Return the sample of a path of turns. Only the turns in ``new`` are trained on."""
        token_ids = path[-1].token_ids
        length = len(token_ids)
        turns, rewards = np.full(length, -1, dtype=np.int32), np.zeros(length, dtype=np.float32)
        first = len(path[0].read)
        sample = Sample(
            token_ids=token_ids,
            response_mask=np.zeros(length, dtype=bool),
            behaviour_logprobs=np.zeros(length, dtype=np.float32),
            versions=np.full(length, -1, dtype=np.int32),
            finish_reason="length" if path[-1].out_of_room else "stop",
            response_text=decoded(token_ids[first:], self._decoder),
            score=score,
            reward=reward,
            turns=turns,
            turn_rewards=rewards,
            turn_states=np.full(length, -1, dtype=np.int64),
            routed_experts=joined_routing([turn.sampled.routed_experts for turn in path], length),
        )
        end = 0
        for turn in path:
            start = end + len(turn.read)
            end = start + len(turn.sampled.token_ids)
            if turn in new:
                sample.response_mask[start:end] = True
                sample.behaviour_logprobs[start:end] = turn.sampled.logprobs
                sample.versions[start:end] = turn.sampled.versions
                turns[start:end] = turn.number
            if turn is last and turn in new:
                rewards[end - 1] = reward
        return sample


def normal_forms(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return a digest of each message that ignores differences in form when a client sends the message back.

    The digest covers the role, the text (null equals empty; a list of parts equals the joined text), the names and
    arguments of tool calls as JSON values, and, for a tool's message, the position of the call that it answers.
    """
    forms, calls = list[str](), dict[str, int]()
    for message in messages:
        if message.get("tool_calls"):
            calls = {call_id: place for place, call_id in enumerate(_ids(message))}
        forms.append(_form(message, calls.get(str(message.get("tool_call_id")), -1)))
    return tuple(forms)


def _form(message: Message, call: int = -1) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)
    if message["role"] == "assistant":
        content = content.strip()
    functions = [each["function"] for each in message.get("tool_calls") or ()]
    calls = [(function["name"], _value(function["arguments"])) for function in functions]
    place = call if message["role"] == "tool" else -1
    return _digest(f"{message['role']}\n{place}\n{_canonical(calls) if calls else ''}\n{content}")


def _value(arguments: Any) -> Any:
    """Return the arguments of a tool call as a JSON value; a text that is no JSON is returned unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _canonical(value: Any) -> str:
    """Return a JSON value as one line of text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _ids(message: Message) -> list[str]:
    return [str(call.get("id")) for call in message.get("tool_calls") or ()]


def _answer_forms(message: Message, stop: Sequence[str]) -> frozenset[str]:
    """Return the normal forms of an answer: without a stop string, and with each one, because clients may append it."""
    text = message["content"]
    return frozenset(_form({**message, "content": text + end}) for end in ("", *stop))


def _recorded(turn: _Turn, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the answers up to ``turn`` as recorded, including reasoning that clients leave out."""
    restored, place = list(messages), -1
    for each in turn.path:
        place += len(each.asked) + 1
        restored[place] = each.message
    return restored
