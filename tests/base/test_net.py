"""Listening: what a message advises fits what was wrong."""

import pytest

from paceline.base.errors import UserError
from paceline.base.net import listen


def test_an_address_of_another_machine_is_told_from_a_port_that_is_used() -> None:
    with pytest.raises(UserError, match=r"listen on 192\.0\.2\.1:0: .*; name an address of this machine"):
        listen("192.0.2.1", 0)  # of documentation, RFC 5737
    with listen("127.0.0.1", 0) as used:
        port = used.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: .*; choose another port, or end what listens there"):
            listen("127.0.0.1", port)
