"""Typed payloads: there and back by annotation; what is refused, what is cleaned."""

import dataclasses
import datetime
import decimal
import enum
import inspect
import json
import math
import time
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from fanout_procrastinate import codec, errors, sanitise
from fanout_procrastinate.codec import Codec


class Colour(enum.Enum):
    RED = "red"


class Paper(pydantic.BaseModel):
    id: str
    path: str = "/papers/a.pdf"
    title: str | None = None
    score: float = 0.0
    extra: Any = None


@dataclasses.dataclass
class Page:
    number: int
    text: str = ""
    tags: set[str] = dataclasses.field(default_factory=set)


class Row(TypedDict):
    id: int
    note: NotRequired[str]


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    day: datetime.date
    amount: decimal.Decimal
    key: uuid.UUID
    where: Path
    colour: Colour
    pair: tuple[int, str]

    @pydantic.computed_field
    @property
    def year(self) -> int:
        return self.day.year


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(alias="No")
    label: str = pydantic.Field(validation_alias="lbl")
    kind: str = pydantic.Field(default="x", serialization_alias="k")


class Trimmed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(str_strip_whitespace=True)

    title: str
    when: datetime.date


STRICT = Strict(
    day=datetime.date(2024, 5, 1),
    amount=decimal.Decimal("1.10"),
    key=uuid.UUID(int=7),
    where=Path("/papers"),
    colour=Colour.RED,
    pair=(1, "a"),
)


storable = st.characters(exclude_categories=["Cs"], exclude_characters="\x00")


class TestRoundTrip:
    @pytest.mark.parametrize(
        ("annotation", "value"),
        [
            (Paper, Paper(id="a", extra={"pages": [1, 2.5, None]})),
            (Page, Page(3, "é😀", {"x"})),
            (Row, {"id": 3}),
            (Strict, STRICT),
            (Aliased, Aliased(No=1, lbl="b", kind="y")),
            (list[Paper], [Paper(id="a"), Paper(id="b")]),
            (dict[str, Page], {"one": Page(1)}),
            (Paper | Row, {"id": 3, "note": "a row"}),
            (Paper | None, None),
            (None, None),
            (str, "12"),
            (str, "null"),
            (bytes, b"text"),
            (tuple[int, ...], (1, 2)),
            (Annotated[int, pydantic.Field(gt=0)], 3),
            (Literal["a", "b"], "a"),
            (datetime.datetime, datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)),
            (Any, {"a": [1, "x", None, True, 1.5]}),
            (inspect.Parameter.empty, ["plain"]),
        ],
        ids=str,
    )
    def test_items_and_results_come_back_as_they_were(self, annotation, value):
        coder = Codec(annotation)
        text = coder.dump_item(value)
        assert coder.load(text) == value
        assert coder.load(text.encode()) == value
        assert coder.load_parsed(json.loads(text)) == value
        assert coder.dump_result(value) == sanitise.Encoded(text)

    @given(st.integers(), st.text(storable))
    def test_any_page(self, number, text):
        coder, page = Codec(Page), Page(number, text)
        assert coder.load(coder.dump_item(page)) == page

    def test_what_fits_is_coerced(self):
        assert Codec(Paper).validate({"id": "a"}) == Paper(id="a")
        assert Codec(Paper).dump_item({"id": "a"}) == Codec(Paper).dump_item(Paper(id="a"))
        assert Codec(list[int]).dump_item(("1", 2.0)) == "[1,2]"

    def test_any_takes_what_pydantic_can_serialise(self):
        value = {"paper": Paper(id="a"), "day": datetime.date(2024, 5, 1), "page": Page(1)}
        loaded = Codec().load(Codec().dump_result(value).text)
        assert loaded["paper"]["id"] == "a"
        assert loaded["day"] == "2024-05-01"
        assert loaded["page"] == {"number": 1, "text": "", "tags": []}
        assert Codec().load(Codec().dump_item({"paper": Paper(id="a")}))["paper"]["id"] == "a"

    def test_bytes_as_base64(self):
        coder = Codec(pydantic.Base64Bytes)  # takes base64, gives bytes
        assert coder.load(coder.dump_item(b"/wA=")) == b"\xff\x00"

    def test_computed_fields_are_not_stored(self):
        assert "year" not in json.loads(Codec(Strict).dump_item(STRICT))


class TestRefusal:
    @pytest.mark.parametrize(
        ("annotation", "value", "message"),
        [
            (Paper, {"score": "x"}, r"does not fit Paper: id: Field required; score: "),
            (Paper, 3, "does not fit Paper: Input should be"),
            (Page, {"number": "x"}, "does not fit Page: number: "),
            (Row, {}, "does not fit Row: id: Field required"),
            (int, "x", "does not fit int: "),
            (None, 3, "does not fit None: "),
            (list[int], ["x"] * 9, "and 6 more"),
            (Paper, Paper.model_construct(id=3), "cannot become JSON as Paper: "),
            (Any, object(), "cannot become JSON as Any: .*object"),
            (Any, {"f": print}, "cannot become JSON as Any: "),
            (bytes, b"\xff", "not UTF-8; annotate them as pydantic.Base64Bytes"),
            (Any, [b"\xff"], "not UTF-8"),
        ],
        ids=lambda value: repr(value).partition(" at 0x")[0],
    )
    def test_what_does_not_fit_or_cannot_become_json(self, annotation, value, message):
        """A result that its annotation refuses is an error that names the type."""
        for dump in (Codec(annotation).dump_item, Codec(annotation).dump_result):
            with pytest.raises(errors.InvalidValue, match=message) as caught:
                dump(value)
            assert isinstance(caught.value, ValueError)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 400

    @pytest.mark.parametrize("failure", [RuntimeError("no"), KeyError("no"), OSError("\ud800")])
    def test_validators_and_serialisers_that_raise(self, failure):
        def fail(value):
            raise failure

        refused = Annotated[str, pydantic.BeforeValidator(fail)]
        stuck = Annotated[str, pydantic.PlainSerializer(fail)]
        for annotation in (refused, stuck):
            for dump in (Codec(annotation).dump_item, Codec(annotation).dump_result):
                with pytest.raises(errors.InvalidValue) as caught:
                    dump("x")
                str(caught.value).encode()

    def test_stored_text_that_no_longer_fits(self):
        for text in ('{"id":3}', "{", "null"):
            with pytest.raises(errors.InvalidValue, match="no longer fits Paper"):
                Codec(Paper).load(text)
        with pytest.raises(errors.InvalidValue, match="no longer fits Paper"):
            Codec(Paper).load_parsed({"id": 3})

    @pytest.mark.parametrize("annotation", [type("Plain", (), {}), list["Nowhere"]])  # noqa: F821
    def test_types_without_a_schema(self, annotation):
        with pytest.raises(errors.ConfigurationError, match="annotate with a pydantic model"):
            Codec(annotation)

    def test_a_model_that_names_what_does_not_exist(self):
        class Incomplete(pydantic.BaseModel):
            part: "Nowhere"  # noqa: F821

        with pytest.raises(errors.ConfigurationError, match="Incomplete cannot be stored"):
            Codec(Incomplete)

    def test_a_model_that_was_incomplete_when_defined(self):
        class Later(pydantic.BaseModel):
            paper: "Paper"
            colour: "list[Colour]"

        assert Codec(Later).dump_item({"paper": {"id": "a"}, "colour": []})


def deep(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


UNSTORABLE = [
    (Paper, Paper(id="a\x00b"), "NUL", {"id": "a\ufffdb"}),
    (Paper, Paper(id="a", extra={"k\x00": 1}), "NUL", {"extra": {"k\ufffd": 1}}),
    (Paper, Paper(id="a", extra="\\\x00"), "NUL", {"extra": "\\\ufffd"}),
    (Paper, Paper(id="a", score=math.nan), "NaN", {"score": None}),
    (Paper, Paper(id="a", score=-math.inf), "NaN", {"score": None}),
    (Paper, Paper(id="a", extra=[{"x": math.inf}]), "NaN", {"extra": [{"x": None}]}),
    (Paper, Paper.model_construct(id="\ud800"), "surrogate", {"id": "\ufffd"}),
    (Paper, Paper(id="a", extra=Path("\udcff.pdf")), "surrogate", {"extra": "\ufffd.pdf"}),
    (Paper, Paper(id="a", extra={"\ud800": Path("b")}), "surrogate", {"extra": {"\ufffd": "b"}}),
    (Page, Page(1, "\ud800\x00"), "surrogate", {"text": "\ufffd\ufffd"}),
    (Page, Page(1, "x", {"\x00"}), "NUL", {"tags": ["\ufffd"]}),
    (Row, {"id": 1, "note": "\x00"}, "NUL", {"note": "\ufffd"}),
    (dict[str, Any], {"x": (1, math.nan)}, "NaN", {"x": [1, None]}),
    (dict[str, Any], {"n": 10**5000}, "digits", {"n": "[integer of about 5000 digits]"}),
]


class TestUnstorable:
    """D05: in an item it is refused before any row exists, in a result it is cleaned."""

    @pytest.mark.parametrize(("annotation", "value", "reason", "kept"), UNSTORABLE, ids=range(14))
    def test_items_refuse_it(self, annotation, value, reason, kept):
        with pytest.raises(errors.InvalidValue, match=f"{reason}.*remove or replace it"):
            Codec(annotation).dump_item(value)

    @pytest.mark.parametrize(("annotation", "value", "reason", "kept"), UNSTORABLE, ids=range(14))
    def test_results_are_cleaned_and_marked(self, annotation, value, reason, kept):
        encoded = Codec(annotation).dump_result(value)
        assert encoded.cleaned
        assert sanitise.is_storable(encoded.text)
        stored = json.loads(encoded.text)
        assert {key: stored[key] for key in kept} == kept

    @pytest.mark.parametrize("annotation", [float, list[float], dict[str, float], set[float]])
    def test_nan_wherever_it_stands(self, annotation):
        value = {float: math.nan, list[float]: [1, math.nan], dict[str, float]: {"a": math.nan}}
        given = value.get(annotation, {math.inf})
        with pytest.raises(errors.InvalidValue, match="NaN"):
            Codec(annotation).dump_item(given)
        assert Codec(annotation).dump_result(given).cleaned

    @pytest.mark.parametrize("mode", ["constants", "strings", "null"])
    def test_nan_by_the_settings_of_a_model(self, mode):
        class Measured(pydantic.BaseModel):
            model_config = pydantic.ConfigDict(ser_json_inf_nan=mode)

            x: float
            note: str | None = None

        coder, value = Codec(Measured), Measured(x=math.nan)
        if mode == "strings":  # the text "NaN" is JSON like any other
            assert math.isnan(coder.load(coder.dump_item(value)).x)
            assert not coder.dump_result(value).cleaned
            return
        with pytest.raises(errors.InvalidValue, match="NaN"):
            coder.dump_item(value)
        assert coder.dump_result(value) == sanitise.Encoded('{"note":null,"x":null}', True)

    @pytest.mark.parametrize(
        "value",
        [
            "NaN",
            "Infinity and null",
            "\\u0000",
            "\\\\u0000",
            ["-Infinity", None],
            "7" * 5000,
            {"null": None},
            "\ufffd",
            10**4299,
            deep(200),
            [[[]]] * 500,
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_what_only_looks_like_it_is_kept(self, value):
        coder = Codec()
        assert coder.load(coder.dump_item(value)) == value
        assert not coder.dump_result(value).cleaned

    @pytest.mark.parametrize("levels", [202, 240, 300, 5000])
    def test_nesting_that_could_not_be_read_back(self, levels):
        with pytest.raises(errors.InvalidValue):
            Codec().dump_item(deep(levels))
        encoded = Codec().dump_result(deep(levels))
        assert encoded.cleaned
        assert Codec().load(encoded.text)

    def test_cycles(self):
        ring = {}
        ring["self"] = ring
        with pytest.raises(errors.InvalidValue, match=r"[Cc]ircular"):
            Codec().dump_item(ring)
        encoded = Codec().dump_result(ring)
        assert encoded.cleaned
        assert "[cycle]" in encoded.text

    def test_constraints_that_refuse_text_are_met_by_cleaning(self):
        """Such a type takes no lone surrogate at all; its neighbours stay as they are."""
        value = {"title": "\ud800 ", "when": datetime.date(2024, 5, 1)}
        encoded = Codec(Trimmed).dump_result(value)
        assert json.loads(encoded.text) == {"title": "\ufffd", "when": "2024-05-01"}
        assert encoded.cleaned
        with pytest.raises(errors.InvalidValue, match="does not fit Trimmed: title"):
            Codec(Trimmed).dump_item(value)

    def test_cleaning_does_not_make_a_wrong_type_fit(self):
        with pytest.raises(errors.InvalidValue, match="does not fit"):
            Codec(dict[str, str]).dump_result({"a": object(), "b": "\x00"})


@pytest.mark.acceptance
@pytest.mark.measured
def test_small_items_are_dumped_in_microseconds():
    """A manager stages a hundred thousand items, each read back once: 20 µs, with room here."""
    coder, item = Codec(Paper), Paper(id="a", title="t")
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(2000):
            coder.dump_item(item)
        best = min(best, (time.perf_counter() - start) / 2000)
    assert best < 100e-6  # the suite runs under coverage


class TestOfFunctions:
    def test_item_and_result_of_a_child(self):
        def child(context: "Nowhere", paper: Paper) -> list[Page]: ...  # noqa: F821

        assert codec.item_codec(child, skip_first=True).annotation is Paper
        assert codec.result_codec(child).annotation == list[Page]

    def test_without_annotations(self):
        def child(item): ...

        assert codec.item_codec(child).annotation is Any
        assert codec.result_codec(child).annotation is Any

    def test_local_names_by_namespace(self):
        class Local(pydantic.BaseModel):
            id: int

        def child(item: "Local") -> "Local | None": ...

        assert codec.item_codec(child, namespace=locals()).annotation is Local
        assert codec.result_codec(child, namespace=locals()).annotation == Local | None
        with pytest.raises(errors.ConfigurationError, match=r"'item'.*top of the module"):
            codec.item_codec(child)


class Secret(pydantic.BaseModel):
    token: pydantic.SecretStr


class Forgetful(pydantic.BaseModel):
    kept: int
    lost: int = pydantic.Field(exclude=True)


class Climbing(pydantic.BaseModel):
    level: int

    @pydantic.field_validator("level")
    @classmethod
    def climb(cls, value: int) -> int:
        return value + 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Secret(token=pydantic.SecretStr("hunter2")), "comes back from JSON as something else"),
        (Forgetful(kept=1, lost=2), "does not come back from JSON"),
        (Climbing(level=1), "comes back from JSON as something else"),
    ],
    ids=["secret", "excluded", "validator"],
)
def test_item_that_would_reach_its_child_changed_is_refused(
    value: pydantic.BaseModel, reason: str
) -> None:
    """F10, D05: what cannot be read back is refused before any row exists."""
    with pytest.raises(errors.InvalidValue, match=reason):
        codec.Codec(type(value)).dump_item(value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (dict, {1: "a", "1": "b"}),
        (dict, {"day": datetime.date(2024, 5, 1)}),
        (list, [b"bytes"]),
        (Any, {"tags": {"x"}}),
        (Any, {None: 1}),
        (Any, Path("/papers")),
        (inspect.Parameter.empty, [{1: "a"}]),
    ],
    ids=repr,
)
def test_item_whose_contents_nothing_names_is_refused_where_it_would_change(
    annotation: Any, value: Any
) -> None:
    with pytest.raises(errors.InvalidValue, match=r"a set, a date.*annotate the child's item"):
        Codec(annotation).dump_item(value)


@pytest.mark.parametrize("value", [{"a": (1, [2.5, None])}, {"é": {"b": [True, "1"]}}, {}])
@pytest.mark.parametrize("annotation", [dict, Any])
def test_item_of_plain_contents_is_taken(annotation: Any, value: Any) -> None:
    """A tuple comes back as a list, which is not held against it."""
    assert json.loads(Codec(annotation).dump_item(value)) == json.loads(json.dumps(value))


class Tried:
    """A value whose comparison raises."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


@pydantic.dataclasses.dataclass(eq=False)
class Incomparable(Tried):
    number: int


def test_item_that_cannot_be_compared_is_taken() -> None:
    assert Codec().dump_item([Incomparable(1)]) == '[{"number":1}]'


class Scanned(Paper):
    dpi: int


class Copied(Paper):
    pass


@dataclasses.dataclass
class Plate(Page):
    colour: str = "red"


class Folder(pydantic.BaseModel):
    first: Paper
    pages: list[Page] = []


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Paper, Scanned(id="a", dpi=300)),
        (Page, Plate(1)),
        (list[Paper], [Scanned(id="a", dpi=300)]),
        (Folder, Folder(first=Scanned(id="a", dpi=300))),
        (Folder, Folder(first=Paper(id="a"), pages=[Plate(1)])),
    ],
    ids=["model", "dataclass", "list", "field", "list in a field"],
)
def test_item_that_would_lose_fields_of_a_subclass_is_refused(annotation: Any, value: Any) -> None:
    with pytest.raises(errors.InvalidValue, match="fields of a subclass"):
        Codec(annotation).dump_item(value)


def test_subclass_without_fields_of_its_own_loses_nothing() -> None:
    for value in (Copied(id="a"), Paper(id="a")):
        assert Codec(Paper).load(Codec(Paper).dump_item(value)) == Paper(id="a")
    folder = Folder(first=Copied(id="a"), pages=[Page(1)])
    assert json.loads(Codec(Folder).dump_item(folder))["first"]["id"] == "a"
