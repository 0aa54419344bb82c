"""Every error has a status, a code and one shape, and an unexpected one reveals nothing."""

import pytest

from holdfast import errors
from holdfast.api.errors import to_response
from holdfast.errors import HoldfastError


def every_error(kind: type[HoldfastError] = HoldfastError) -> list[type[HoldfastError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in every_error(child))]


def test_every_error_has_a_status_a_code_and_the_one_shape() -> None:
    for kind in every_error():
        made = kind.__new__(kind)
        HoldfastError.__init__(made, "what")
        if kind is errors.RateLimited:
            made = errors.RateLimited(2.0)
        response = to_response(made)
        assert response.status_code == kind.status
        assert response.status_code in (400, 401, 403, 404, 408, 409, 413, 416, 422, 429, 500, 503, 507)
        assert f'"code":"{kind.code}"'.encode() in bytes(response.body)
    codes = [kind.code for kind in every_error() if kind.__module__ == errors.__name__]
    assert len(set(codes)) == len(codes)


def test_unexpected_error_reveals_nothing(caplog: pytest.LogCaptureFixture) -> None:
    response = to_response(RuntimeError("postgresql://user:password@host"))
    assert response.status_code == 500
    assert b"password" not in bytes(response.body)
    assert "password" in caplog.text
    away = to_response(errors.StoreUnreachable("cannot reach postgresql://user:password@host"))
    assert b"password" not in bytes(away.body)
