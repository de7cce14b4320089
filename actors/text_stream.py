"""One request's tokens to the `Delta`s its reader sees: detokenise, screen for stop strings, decide the end."""

from __future__ import annotations

from collections.abc import Iterable

from actors.detokenizer import Decoder, Detokenizer
from actors.engine import StepOutput
from actors.request import Delta, FinishReason, GenerateRequest, TokenLogprob
from actors.stops import Screened, StopMatcher


class TextStream:
    """Feed it step outputs in order; it says what to send. After a delta with a finish reason, feed nothing more."""

    def __init__(self, request: GenerateRequest, decoder: Decoder) -> None:
        self._request = request
        self._detokenizer = Detokenizer(
            decoder, request.prompt_token_ids, skip_special_tokens=request.skip_special_tokens
        )
        self._count = 0
        self._matcher = StopMatcher(request.stop, include=request.include_stop_str_in_output)

    def feed(self, outputs: Iterable[StepOutput]) -> Delta:
        """One delta for all of `outputs`. Tokens after a stop string are neither sent nor counted, nor their logprobs."""
        text: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for output in outputs:
            token, reason = output.token, output.finish_reason
            if token is None and reason is None:
                continue
            piece = ""
            if token is not None:
                tokens.append(token)
                self._count += 1
                if output.logprob is not None:
                    logprobs.append(output.logprob)
                if output.is_text:
                    piece = self._detokenizer.push(token)
            if reason is not None:
                piece += self._detokenizer.flush()
            # No stop string ends the text before min_tokens, as no stop token does.
            early = self._count <= self._request.sampling.min_tokens
            screened = Screened(piece) if early else self._matcher.push(piece)
            text.append(screened.text)
            if screened.stop is not None:
                return Delta("".join(text), tuple(tokens), "stop", screened.stop, tuple(logprobs))
            if reason is not None:
                text.append(self._matcher.flush())
                stop_reason = self._stop_reason(reason, token)
                return Delta("".join(text), tuple(tokens), reason, stop_reason, tuple(logprobs))
        return Delta("".join(text), tuple(tokens), logprobs=tuple(logprobs))

    def _stop_reason(self, reason: FinishReason, token: int | None) -> int | None:
        return token if reason == "stop" and token in self._request.sampling.stop_token_ids else None
