"""The API, asked all that its own OpenAPI document allows and much that it does not.

Not asked here: /api/events, whose answer never ends. `test_serve` listens to it.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web.app import create_app
from hilbert_monitor.service.web.notebook import Notebook
from tests.support.services import FORMULA, IMAGE, write_zoo

EXAMPLES = 8
ROUTES = sorted(
    (path, method.upper())
    for path, methods in create_app(Index(Path("nowhere"))).openapi()["paths"].items()
    for method in methods
    if path != "/api/events"
)
TOKEN = "a-token-for-the-fuzz"
SIGNED = {"Authorization": f"Bearer {TOKEN}"}
IDS = ["AdamW-0", "failed", "empty", "broken", IMAGE, FORMULA.replace("/", "")]


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    import schemathesis  # by one process of those that run tests, and not by each that looks for them

    root = tmp_path_factory.mktemp("zoo")
    write_zoo(root)
    index = Index(root)
    index.refresh()
    assert {*IDS} <= index.runs.keys()
    notebook = Notebook(tmp_path_factory.mktemp("data"))
    app = create_app(index, token=TOKEN, allowed_hosts=["testserver"], notebook=notebook)
    document = schemathesis.openapi.from_asgi("/api/openapi.json", app, headers=SIGNED)
    return document


@pytest.mark.few(14)
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_every_answer_is_as_documented_and_none_is_a_fault(document, path, method, mode):
    from schemathesis import GenerationMode

    operation = document[path][method]
    if mode == "negative" and method == "GET" and not len(operation.query):
        pytest.skip("there is nothing to ask wrongly: any text may be an id")

    @seed(0)
    @settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)), id=st.sampled_from([None, *IDS]))
    def ask(case, id):
        if id is not None and "id" in case.path_parameters:
            case.path_parameters["id"] = id  # else nearly every answer would be that there is no such run
        case.call_and_validate(headers=SIGNED)

    ask()
