"""What the errors of a codec show of a message."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from stream_consumers.errors import FormatError
from stream_consumers.subscription.backend import Delivery, Envelope, EventMessage, JsonCodec, MalformedEntry
from stream_consumers.subscription.config import RetryPolicy, SubscriptionConfig
from stream_consumers.subscription.memory_backend import MemoryBackend
from stream_consumers.subscription.subscription import (
    REASON,
    ErrorReport,
    ErrorScope,
    ReceivedMessage,
    Subscription,
    log_error,
)
from tests.support.polling import until

PAYLOAD = "card 4111 of Jos\xe9".encode("latin-1")
NOW = datetime.now(timezone.utc)


class Text(JsonCodec):
    """Encodes text only."""

    def encode(self, message: EventMessage) -> bytes:
        return message.payload.decode().encode()


def test_the_reason_of_a_malformed_entry_has_no_bytes_of_it() -> None:
    entry = Envelope(JsonCodec(), 0).open("7-0", b'{"payload": "%s"}' % PAYLOAD, Delivery(1, NOW, NOW))
    assert isinstance(entry, MalformedEntry)
    assert entry.error == "it cannot be decoded: UnicodeDecodeError: invalid continuation byte at 29"


def test_the_error_of_a_codec_that_cannot_encode_has_no_bytes_of_the_message() -> None:
    with pytest.raises(FormatError, match=r"'u1' cannot be encoded: UnicodeDecodeError: .* at 16") as raised:
        Envelope(Text(), 0).seal(EventMessage(PAYLOAD, uid="u1"))
    assert "4111" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_the_reason_of_a_dead_letter_has_no_bytes_that_a_handler_could_not_decode() -> None:
    def handler(received: ReceivedMessage) -> None:
        received.message.payload.decode()

    backend = MemoryBackend()
    backend.publish("orders", EventMessage(PAYLOAD))
    config = SubscriptionConfig(
        stream="orders", group="billing", dead_letter_stream="dead", retry=RetryPolicy(max_retries=0)
    )
    with Subscription(backend, config, handler):
        until(lambda: backend.entries("dead"), seconds=60)
    ((_, raw),) = backend.entries("dead")
    reason = JsonCodec().decode(raw).headers[REASON]
    assert reason.startswith("UnicodeDecodeError: ")
    assert "4111" not in reason


def test_the_default_observer_logs_the_place_of_an_error_and_not_its_text(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("card 4111")
    except ValueError as error:
        log_error(ErrorReport(ErrorScope.HANDLER, error, "orders", "billing", "me", "7-0", 1))
    assert "ValueError" in caplog.text
    assert __file__ in caplog.text
    assert "4111" not in caplog.text
