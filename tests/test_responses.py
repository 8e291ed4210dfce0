"""Statuses and waits found on the errors of HTTP clients, by their attributes alone."""

import datetime
import email.message
import email.utils
import http
import types
import urllib.error

import httpx
import pytest

from fanout_procrastinate import responses

SEVEN_DAYS = 7 * 86400.0
REQUEST = httpx.Request("GET", "https://api.example")


class ApiError(Exception):
    """Stands for the errors of many clients: attributes are given as they come."""

    def __init__(self, **attributes):
        super().__init__("refused")
        vars(self).update(attributes)


def holder(**attributes):
    return types.SimpleNamespace(**attributes)


def httpx_error(status, **headers):
    response = httpx.Response(status, headers=headers, request=REQUEST)
    return httpx.HTTPStatusError("refused", request=REQUEST, response=response)


def urllib_error(status, **headers):
    message = email.message.Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return urllib.error.HTTPError("https://api.example", status, "refused", message, None)


def botocore_error(status, **headers):
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return ApiError(response={"Error": {"Code": "Slow"}, "ResponseMetadata": metadata})


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (httpx_error(503), 503),
        (urllib_error(404), 404),
        (botocore_error(429), 429),
        (ApiError(status_code=422), 422),  # openai, anthropic, starlette, azure
        (ApiError(status=429), 429),  # aiohttp, kubernetes
        (ApiError(http_status=402), 402),  # stripe
        (ApiError(code=http.HTTPStatus.NOT_FOUND), 404),  # google-api-core
        (ApiError(response=holder(status_code=500)), 500),  # requests
        (ApiError(response=holder(status=502)), 502),
        (ApiError(status_code=None, response=holder(status_code=410)), 410),
        (ApiError(status="open", response=holder(status=410)), 410),
        (ApiError(status=0), None),
        (ApiError(status=True), None),
        (ApiError(status=99), None),
        (ApiError(status=600), None),
        (ApiError(status="404"), None),
        (ApiError(status=404.0), None),
        (ApiError(code=lambda: 404), None),  # grpc
        (ApiError(code=-32000), None),  # json-rpc
        (ApiError(response=None), None),
        (ApiError(response={"ResponseMetadata": None}), None),
        (ValueError("404"), None),
        (SystemExit(404), None),
    ],
)
def test_status(exc, status):
    assert responses.status_of(exc) == status


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0),
        (" 120 ", 120.0),
        ("1.5", 1.5),
        ("0", 0.0),
        ("-5", 0.0),
        ("+5", 5.0),
        (str(10**12), SEVEN_DAYS),
        ("9" * 150, SEVEN_DAYS),
        ("Fri, 31 Dec 9999 23:59:59 GMT", SEVEN_DAYS),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 -2300", None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("1_000", None),
        ("٣", None),
        ("\x00", None),
        ("Fri, 99 Foo 2099 23:59:59 GMT", None),
    ],
)
def test_retry_after_is_read_and_clamped(text, seconds):
    """D03: Retry-After of 120, -5, 10^12, a date, junk."""
    assert responses.retry_after(ApiError(headers={"Retry-After": text})) == seconds


@pytest.mark.parametrize(
    "exc",
    [
        httpx_error(429, **{"retry-AFTER": "7"}),
        urllib_error(429, RETRY_AFTER="7"),
        botocore_error(429, **{"retry-after": "7"}),
        ApiError(headers={b"Retry-After": b"7"}),
        ApiError(headers=[("X", "1"), ("Retry-After", 7)]),
        ApiError(response=holder(headers={"Retry-After": "7"})),
        ApiError(response=holder(headers={}), headers={"Retry-After": "7"}),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_retry_after_wherever_a_client_keeps_it(exc):
    assert responses.retry_after(exc) == 7.0


def test_a_date_counts_from_the_date_of_the_response():
    """The clock of the machine that answers may be years off ours."""
    headers = {"Date": "Mon, 01 Jan 2001 00:00:00 GMT", "Retry-After": "Mon, 01 Jan 2001 00:02 GMT"}
    assert responses.retry_after(ApiError(headers=headers)) == 120.0


@pytest.mark.parametrize("sent_at", [None, "yesterday"])
def test_a_date_counts_from_now_without_one(sent_at):
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=600)
    headers = {"Retry-After": email.utils.format_datetime(moment), "Date": sent_at}
    assert responses.retry_after(ApiError(headers=headers)) == pytest.approx(600, abs=5)


class Hostile:
    """Raises whatever is asked of it, and not even an Exception."""

    def __getattribute__(self, name):
        raise KeyboardInterrupt(name)

    def __str__(self):
        raise KeyboardInterrupt


class HostileError(Exception):
    response = headers = status_code = status = code = property(
        lambda self: (_ for _ in ()).throw(SystemExit(3))
    )


@pytest.mark.parametrize(
    "exc",
    [
        HostileError(),
        ApiError(response=Hostile()),
        ApiError(status=Hostile(), headers=Hostile()),
        ApiError(headers={Hostile(): Hostile()}),
        ApiError(headers={"Retry-After": Hostile()}),
        ApiError(headers=[1, ("a",), None, ("a", "b", "c")]),
        ApiError(headers=42),
        ApiError(headers=holder(items=lambda: 1 / 0)),
        ApiError(headers=iter(lambda: ("X", "1"), None)),  # endless
        ApiError(response={"ResponseMetadata": {"HTTPHeaders": 3, "HTTPStatusCode": "x"}}),
    ],
    ids=range(10),
)
def test_nothing_raises(exc):
    assert responses.status_of(exc) is None
    assert responses.retry_after(exc) is None
