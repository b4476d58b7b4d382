"""The HTML file of a run, in Debian's Chromium: it answers, needs no network, and runs nothing."""

import json
import runpy
import shutil
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT
from data import hash_examples, load_examples, tokenize_examples, write_rows
from demo.tiny import make_tokenizer
from paper.view import draw_weights, split_tokens, view

HOSTILE = (
    '</script><script>hacked=1</script><img src=x onerror="hacked=1"><svg onload=hacked=1> <!-- '
    "' \" ` &lt;b&gt; %%data%% \u2028 \x1b[31m red \u202e left \\boxed{<b onclick=hacked=1>B</b>}"
)
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
FLAGS += ("disable-background-networking", "disable-component-update", "window-size=1400,1000")


EXAMPLES = [
    {"id": f"q{n}", "question": f"{n}+1", "solution": f"{n}+1={n + 1}", "answer": str(n + 1)}
    for n in range(4)
]


def write_run(folder: Path, batches: list[dict], examples=EXAMPLES, **args) -> Path:
    """A run as a script leaves it. A batch maps ids to answers: (text, right, other fields)."""
    folder.mkdir()
    data = folder.parent / "train.jsonl"
    write_rows([{"source": "world", **example} for example in examples], data)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "final")
    kept, _ = tokenize_examples(load_examples(str(data)), tokenizer, 10_000, 10)
    args = {"model": f"{folder}/absent", "data": str(data), "weighting": "oswft", **args}
    args |= {"max_length": 10_000, "max_completion_length": 10}
    record = {"args": args, "data_hash": hash_examples(kept)}
    (folder / "args.json").write_text(json.dumps(record))
    steps = [{"step": n, "loss": 1 / n, "train_s": 1.0} for n in range(1, 1 + (len(batches) or 3))]
    write_rows(steps, folder / "metrics.jsonl")
    for step, batch in enumerate(batches, start=1):
        rows = [
            {
                "id": id,
                "query": query,
                "pass_rate": sum(right for _, right, _ in answers) / len(answers),
                "correct": right,
                "text": text,
                "token_ids": [17, 18, 13],
                "finish_reason": "stop",
                "logprobs": [],
                **fields,
            }
            for query, (id, answers) in enumerate(batch.items())
            for text, right, fields in answers
        ]
        write_rows(rows, folder / "rollouts" / f"step_{step:06d}.jsonl")
    return folder


def weighed(*rights: bool, text: str = "so \\boxed{7}", **fields) -> list[tuple]:
    """OSW-FT's answers to a query."""
    return [(text, right, {"weight": 1 - sum(rights) / len(rights), **fields}) for right in rights]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A driver of a browser; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs):
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


class Page:
    """A file in the browser."""

    def __init__(self, driver, path: Path):
        self.driver, self.url = driver, path.as_uri()
        driver.get(self.url)

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        read = "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)"
        return self.driver.execute_script(read, selector)

    def cells(self, column: str) -> list[str]:
        """What a column shows, from the first row to the last."""
        titles = self.texts("#queries thead tr:first-child .dt-column-title")
        cells = self.texts("#queries tbody > tr > td:not([colspan])")
        return cells[titles.index(column) :: len(titles)]

    def shows(self, column: str, cells: list[str]) -> bool:
        return wait(lambda: self.cells(column) == cells) or self.cells(column) == cells

    def click(self, id: str) -> None:
        """Click on the first query of this id."""
        self.driver.find_element("xpath", f"//td[text()={json.dumps(id)}]").click()

    def open(self, id: str) -> str:
        """Click on a query; returns the text that this shows."""
        self.click(id)
        assert wait(lambda: self.texts("section"))
        return self.find("section").text

    def check(self) -> None:
        """Nothing is in the console, nothing was run, nothing was asked of a network."""
        assert self.driver.get_log("browser") == []
        assert self.driver.execute_script("return typeof hacked") == "undefined"
        logged = [
            json.loads(row["message"])["message"] for row in self.driver.get_log("performance")
        ]
        sent = [row["params"] for row in logged if row["method"] == "Network.requestWillBeSent"]
        ours = [params["request"]["url"] for params in sent if params["documentURL"] == self.url]
        assert {url.partition(":")[0] for url in ours} == {"file", "data"}


def wait(done, seconds: float = 20) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not (result := done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(result)


@pytest.fixture
def browse(chromium, tmp_path):
    """Makes a file of runs, and opens it."""
    pages = []

    def browse(*runs: Path) -> Page:
        view(runs, tmp_path / "a view.html")
        pages.append(Page(chromium, tmp_path / "a view.html"))
        return pages[-1]

    yield browse
    pages[-1].check()


@pytest.fixture
def oswft(tmp_path) -> Path:
    """Four queries, the first of them asked twice."""
    first = {"q0": weighed(False, False), "q1": weighed(True, False), "q2": weighed(True, True)}
    second = {"q3": weighed(False, False), "q0": weighed(True, False)}
    return write_run(tmp_path / "oswft", [first, second])


def test_the_table_sorts_filters_and_searches(browse, oswft):
    page = browse(oswft)
    assert page.shows("step", ["2", "2", "1", "1", "1"])
    header = page.driver.find_element("xpath", "//th[contains(., 'w') and not(contains(., 'n'))]")
    header.click()
    assert page.shows("w", ["1", "1", "0.5", "0.5", "0"])
    header.click()
    assert page.shows("w", ["0", "0.5", "0.5", "1", "1"])
    filters = page.driver.find_elements("css selector", "#queries thead input")
    filters[7].send_keys("0.5")
    assert page.shows("w", ["0.5", "0.5"]) and sorted(page.cells("id")) == ["q0", "q1"]
    page.find("input[type=search]").send_keys("1+1")  # in the question
    assert page.shows("id", ["q1"])
    page.find("input[type=search]").send_keys("+1")
    assert wait(lambda: page.texts("#queries .dt-empty"))
    page.find("#queries .dt-empty").click()


def test_a_choice_shows_what_the_model_failed_at_when_last_asked(browse, oswft):
    page = browse(oswft)
    assert page.shows("newest", ["none right", "some right", "", "some right", "all right"])
    for choice, expected in [("none", ["q3"]), ("some", ["q0", "q1"]), ("all", ["q2"])]:
        page.find(f"option[value={choice}\\ right]").click()
        assert page.shows("id", expected)  # q0 does not fail any more
    page.find("option").click()
    assert page.shows("id", ["q3", "q0", "q0", "q1", "q2"])


def test_a_click_shows_why_a_query_weighs_as_much_as_it_does(browse, tmp_path):
    tokens = {"token_ids": [17, 18, 13], "logprobs": [-0.01, -2.5, -0.2]}
    right, wrong = weighed(True, False, text="so \\boxed{1}")
    wrong = ("so \\boxed{ 99}", False, {**wrong[2], **tokens, "finish_reason": "length"})
    page = browse(write_run(tmp_path / "run", [{"q0": [right, wrong]}]))
    shown = page.open("q0")
    assert "1 of 2 answers right: p̂ = 0.5" in shown and "weight 0.5 (w = 1 − p̂)" in shown
    assert "Question\n0+1" in shown and "reference: 1\n0+1=1" in shown
    assert "Answer 1 · right · extracted: 1 · 3 tokens\nso \\boxed{1}" in shown
    assert "Answer 2 · wrong · extracted: 99 · 3 tokens, cut off" in shown
    spans = page.driver.find_elements("css selector", "section span")
    assert [span.text for span in spans] == list("9+5")  # the tokens 17, 18, 13
    assert spans[1].get_attribute("title") == "log p = -2.5, p = 0.082"
    alphas = [float(s.value_of_css_property("background-color")[:-1].split(",")[3]) for s in spans]
    assert alphas == pytest.approx([0.002, 0.5, 0.04], abs=0.01)  # the less likely, the redder
    spans[0].click()  # in what is open, to select text
    assert page.texts("section")
    page.click("q0")
    assert wait(lambda: not page.texts("section"))


def test_runs_stand_beside_each_other(browse, oswft, tmp_path):
    answers = [("\\boxed{1}", True, {"advantage": 1.0}), ("\\boxed{2}", False, {"advantage": -1.0})]
    grpo = write_run(tmp_path / "grpo", [{"q0": answers}])
    sft = write_run(tmp_path / "sft", [])
    page = browse(sft, oswft, grpo)
    assert set(page.cells("run")) == {"oswft", "grpo"} and page.driver.title == "sft, oswft, grpo"
    images = page.driver.find_elements("css selector", "#images img")
    assert [image.get_attribute("alt") for image in images].count("weights") == 2
    assert all(image.get_property("naturalWidth") for image in images)
    page.find("input[type=search]").send_keys("grpo")
    assert page.shows("mean |A|", ["1"]) and page.cells("w") == [""]
    shown = page.open("q0")
    assert "advantage +1.00" in shown and "advantage -1.00" in shown
    page = browse(sft)
    assert page.find("#images img[alt=loss]") and not page.texts("table")


def test_nothing_that_a_model_wrote_is_run(browse, tmp_path):
    id, run = (
        "<img src=x onerror=hacked=1>'\"</td>",
        "$x^$ <img src=x onerror=hacked=1> \u202e\x1b-->",
    )
    names = ("question", "solution", "answer", "source")
    example = {"id": id, **{name: f"{name} {HOSTILE}" for name in names}}
    tokens = {"token_ids": [17, 18], "logprobs": [-1.0, -1.0]}
    batch = {id: [*weighed(True, text=HOSTILE), *weighed(False, text=HOSTILE, **tokens)]}
    batch["q0"] = weighed(False, text="<b>" * 350_000)
    page = browse(write_run(tmp_path / run, [batch], [*EXAMPLES, example], model="</script><b>x"))
    assert page.cells("run") == [run.replace("\u202e\x1b", "\ufffd\ufffd")] * 2 and page.cells(
        "id"
    ) == ["q0", id]
    assert page.cells("question")[1] == f"question {HOSTILE}"[:300]
    page.find("#queries thead th").click()
    for text in ("onerror", "img src", "</script>"):
        page.find("input[type=search]").clear()
        page.find("input[type=search]").send_keys(text)
        assert wait(lambda: id in page.cells("id"))
    page.driver.execute_script("document.querySelector('tbody td').click()")
    assert wait(lambda: page.texts("section"))
    texts = page.texts("section pre")
    assert texts[1:4] == [f"question {HOSTILE}", f"solution {HOSTILE}", HOSTILE]
    page.find("input[type=search]").clear()
    page.find("input[type=search]").send_keys("0+1")
    assert page.shows("id", ["q0"]) and len(page.open("q0")) > 10**6
    read = "return [...document.querySelectorAll('#browse *')].map(node => node.localName)"
    assert not {"img", "script", "b", "iframe"} & {*page.driver.execute_script(read)}


def test_markup_would_not_run_even_if_it_got_in(chromium, oswft, tmp_path):
    view((oswft,), tmp_path / "view.html")
    page = Page(chromium, tmp_path / "view.html")
    image = "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=hacked=1>')"
    page.driver.execute_script(image)
    blocked = []
    assert wait(lambda: blocked.extend(page.driver.get_log("browser")) or blocked)
    assert "Content Security Policy" in blocked[0]["message"]
    assert page.driver.execute_script("return typeof hacked") == "undefined"


def test_what_is_not_there_any_more_is_said(browse, oswft):
    with (oswft.parent / "train.jsonl").open("a") as out:
        row = {"id": "new", "question": "1", "solution": "1", "answer": "1", "source": "1"}
        out.write(json.dumps(row) + "\n")
    page = browse(oswft)
    assert "no questions and no solutions" in page.find("summary").text
    assert "train.jsonl or the prompt is not what it was" in page.find("summary").text
    assert "so \\boxed{7}" in page.open("q1")
    (oswft.parent / "train.jsonl").unlink()
    assert "train.jsonl: no such file" in browse(oswft).find("summary").text


def test_a_run_that_is_still_going_on_is_shown(browse, oswft):
    shutil.rmtree(oswft / "final")
    (oswft / "rollouts" / "step_000003.jsonl.partial").write_text('{"id": "x", "te')
    page = browse(oswft)
    assert page.shows("id", ["q3", "q0", "q0", "q1", "q2"])
    assert "no questions and no solutions: " in page.find("summary").text


def test_the_histogram_has_the_share_of_each_weight():
    rows = [{"run": "r", "step": step, "p̂": 0, "w": w} for step, w in [(1, 0), (1, 1), (3, 0.5)]]
    axes = draw_weights(rows).axes[0]
    shares = [patch.get_data().values - patch.get_data().baseline for patch in axes.patches]
    assert [list(share) for share in shares] == [[0.5, 0], [0, 1], [0.5, 0]]  # of 0, 0.5 and 1
    assert list(axes.patches[0].get_data().edges) == [1, 3, 5]
    rows = [{"run": "r", "step": n, "p̂": n / 999, "w": None} for n in range(1000)]
    axes = draw_weights(rows).axes[0]
    assert len(axes.patches) == 11 and len(axes.patches[0].get_data().values) <= 60
    assert axes.patches[-1].get_data().values == pytest.approx(1)


def test_tokens_that_make_up_a_character_stand_together():
    known = {1: b"a", 2: b" b", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"\xff", 6: b""}

    def decode(ids):  # as some tokenizers, without a leading space
        return b"".join(known[id] for id in ids).decode(errors="replace").removeprefix(" ")

    def split(*ids):
        return split_tokens(ids, [-1.0] * len(ids), decode)

    assert split(1, 2, 3, 4, 1) == [("a", -1), (" b", -1), ("é", -2), ("a", -1)]
    assert split(1, 6, 1) == [("a", -1), ("[6]", -1), ("a", -1)]
    assert split(3) == [("\ufffd", -1)]
    assert "".join(text for text, _ in split(*[5] * 9)) == "\ufffd" * 9


def test_bad_input_gets_one_line(oswft, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    half = shutil.copytree(oswft, tmp_path / "half")
    with (half / "rollouts" / "step_000001.jsonl").open("a") as out:
        out.write('{"id": "x", "te')
    other = shutil.copytree(oswft, tmp_path / "other")
    write_rows([{"id": "x"}], other / "rollouts" / "step_000001.jsonl")
    unnamed = shutil.copytree(oswft, tmp_path / "unnamed")
    (unnamed / "args.json").unlink()
    file = tmp_path / "view.html"
    for run, output, message in [
        (tmp_path / "empty", file, "empty: holds neither metrics.jsonl nor results.json"),
        (half, file, "half/rollouts/step_000001.jsonl:7: not JSON"),
        (other, file, "other/rollouts/step_000001.jsonl:1: no correct, finish_reason"),
        (unnamed, file, "unnamed: has no args.json of a training run"),
        (oswft, "/proc/view.html", "/proc/view.html: cannot be written"),
        (oswft, half / "args.json" / "view.html", "File exists"),
    ]:
        monkeypatch.setattr(sys, "argv", ["view.py", str(run), "--output", str(output)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "paper" / "view.py"), run_name="__main__")
        assert ended.value.code.startswith("error: ") and message in ended.value.code
        assert "\n" not in ended.value.code and not file.exists()
