"""One line about a version of a host library that nobody tested, and none about one that somebody did."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nvrtc_attn.base import hosts, log


@pytest.mark.parametrize(
    ("installed", "warns"),
    [
        ("5.20.0", False), ("5.23.7", False), ("5.23.0.dev1+cpu", False), ("5.20", False), ("5.21", False),
        ("5.24.0", True),
        ("5.19.9", True), ("6.0", True), ("4.57.1", True), ("5.23.0rc1", False),
    ],
)  # fmt: skip
def test_versions(
    installed: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosts, "_installed", {"host": installed}.__getitem__)
    monkeypatch.setattr(log, "_said", set())
    with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
        hosts.check_version("host", "5.20.0", "5.23.0")
        hosts.check_version("host", "5.20.0", "5.23.0")
    assert len(caplog.records) == warns
    assert all(installed in record.message for record in caplog.records)


def test_an_unknown_version_says_nothing_and_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look-up takes a millisecond, and `nvrtc_attn.torch.enable_sdpa` may be entered in every step."""
    found: list[Any] = [None, hosts.metadata.PackageNotFoundError("host")]  # None: metadata without a version
    asked: list[str] = []

    def version(library: str) -> Any:
        asked.append(library)
        result = found[len(asked) - 1]
        if result is not None:
            raise result
        return None

    monkeypatch.setattr(hosts.metadata, "version", version)
    for _ in range(2):
        hosts._installed.cache_clear()
        with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
            for _ in range(3):
                hosts.check_version("host", "5.20.0", "5.23.0")
    hosts._installed.cache_clear()
    assert asked == ["host", "host"]
    assert not caplog.records
