"""One request's tokens to the `Delta`s its reader sees: detokenise, screen for stop strings, decide the end."""

from __future__ import annotations

from collections.abc import Iterable

from actors.detokenizer import Decoder, Detokenizer
from actors.engine import StepOutput
from actors.request import Delta, FinishReason, GenerateRequest
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
        """One delta for all of `outputs`. Tokens after a stop string are neither sent nor counted."""
        text: list[str] = []
        tokens: list[int] = []
        for output in outputs:
            if output.token is None:
                continue
            tokens.append(output.token)
            self._count += 1
            reason = output.finish_reason
            # The token that stopped generation is a signal, not text.
            piece = "" if reason == "stop" else self._detokenizer.push(output.token)
            if reason is not None:
                piece += self._detokenizer.flush()
            # No stop string ends the text before min_tokens, as no stop token does.
            early = self._count <= self._request.sampling.min_tokens
            screened = Screened(piece) if early else self._matcher.push(piece)
            text.append(screened.text)
            if screened.stop is not None:
                return Delta("".join(text), tuple(tokens), "stop", screened.stop)
            if reason is not None:
                text.append(self._matcher.flush())
                return Delta("".join(text), tuple(tokens), reason, self._stop_reason(reason, output.token))
        return Delta("".join(text), tuple(tokens))

    def _stop_reason(self, reason: FinishReason, token: int) -> int | None:
        return token if reason == "stop" and token in self._request.sampling.stop_token_ids else None
