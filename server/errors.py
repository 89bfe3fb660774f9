"""The one error shape of the HTTP API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import msgspec

# Nobody reads an answer with this status; it is nginx's number for "the client closed the connection".
CLIENT_GONE = 499

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that cannot be answered.

    status: HTTP status. param: the field at fault, None when it is not a field. code: a word for programs; the status
    where there is no better one.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """JSON bytes."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error"),
            "param": self.param,
            "code": self.code if self.code is not None else self.status,
        }
        return msgspec.json.encode({"error": error})


def bad_field(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A field of the body that has to be changed by the client; the message starts with the field's name."""
    return ApiError(400, f"{param} {message}", param=param, code=code)
