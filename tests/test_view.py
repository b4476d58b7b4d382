"""The HTML file of a run, in Debian's Chromium: it answers, needs no network, and runs nothing."""

import json
import shutil
import time
from pathlib import Path

from data import write_rows
from demo.tiny import make_tokenizer
from look.view import view
from run import write_args

import pytest

HOSTILE = (
    '</script><script>hacked=1</script><img src=x onerror="hacked=1"><svg onload=hacked=1> <!-- '
    "' \" ` &lt;b&gt; %%data%% \u2028 \x1b[31m red \u202e left \\boxed{<b onclick=hacked=1>B</b>}"
)
FLAGS = ("headless", "no-sandbox", "disable-background-networking", "window-size=1400,1000")


def write_run(folder: Path, batch: dict[str, list]) -> Path:
    """A run of one batch, which maps ids to answers: fields of their rollouts' rows."""
    data, fields = folder.parent / "train.jsonl", {"solution": "the expert's", "source": HOSTILE}
    fields["answer"] = "7"
    write_rows([{"id": id, "question": f"question {id}", **fields} for id in batch], data)
    make_tokenizer().save_pretrained(folder / "final")
    args = {"model": "absent", "data": str(data), "weighting": "oswft", "note": HOSTILE}
    write_args(folder, args=args)
    write_rows([{"step": 1, "loss": 1.0, "train_s": 1.0}], folder / "metrics.jsonl")
    rows = [
        {"id": id, "query": n, "token_ids": [17, 18, 13], "finish_reason": "stop", **answer}
        for n, (id, answers) in enumerate(batch.items())
        for answer in answers
    ]
    write_rows(rows, folder / "rollouts" / "step_000001.jsonl")
    return folder


def answers(*rewards: float, text: str = "so \\boxed{7}", **fields) -> list[dict]:
    """OSW-FT's answers to a query."""
    p = sum(rewards) / len(rewards)
    rest = {"pass_rate": p, "weight": 1 - p, "text": text, **fields}
    return [{"correct": bool(reward), **rest} for reward in rewards]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A driver of a browser; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


class Page:
    """The file of a run in the browser."""

    def __init__(self, driver, file: Path, run: Path):
        view((run,), file)
        self.driver, self.url = driver, file.as_uri()
        driver.get(self.url)

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        read = "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)"
        return self.driver.execute_script(read, selector)

    def open(self, id: str) -> str:
        """Click on the first query of this id; returns the text that this shows."""
        self.driver.find_element("xpath", f"//td[text()={json.dumps(id)}]").click()
        assert wait(lambda: self.texts("#browse section"))
        return self.find("#browse section").text


def wait(done, seconds: float = 20) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not (result := done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(result)


def test_a_click_shows_why_a_query_counts_and_its_answers_with_colored_tokens(chromium, tmp_path):
    right, wrong = answers(1, 0)
    wrong |= {"text": "so \\boxed{ 99}", "logprobs": [-0.01, -2.5, -0.2], "finish_reason": "length"}
    oswft = write_run(tmp_path / "oswft", {"q0": [right, wrong]})
    page = Page(chromium, tmp_path / "view.html", oswft)
    shown = page.open("q0")
    why = "1 of 2 answers right: p̂ = 0.5, so the solution's weight is 0.5 (--weighting oswft)"
    assert why in shown and "question q0" in shown
    assert "reference: 7\nthe expert's" in shown
    assert "Answer 1 · right · extracted: 7 · 3 tokens\nso \\boxed{7}" in shown
    assert "Answer 2 · wrong · extracted: 99 · 3 tokens, cut off\n9+5" in shown
    assert wait(lambda: page.texts("#first section")) and page.find("#first section").text == shown
    spans = page.driver.find_elements("css selector", "#first section span")
    alphas = [float(s.value_of_css_property("background-color")[:-1].split(",")[3]) for s in spans]
    assert spans[1].text == "+" and alphas[1] > alphas[2] > alphas[0]  # the less likely, the redder
    (tmp_path / "train.jsonl").unlink()
    page = Page(chromium, tmp_path / "view.html", oswft)
    assert "train.jsonl: no such file" in page.find("summary").text and page.open("q0")


def test_nothing_that_a_model_wrote_is_run(chromium, tmp_path):
    id = "</script><img src=x onerror=hacked=1><!-- '\"</td>"
    batch = {id: [*answers(1, text=HOSTILE), *answers(0, text=HOSTILE, logprobs=[-1.0] * 3)]}
    page = Page(chromium, tmp_path / "view.html", write_run(tmp_path / "$x^$ <b>", batch))
    assert wait(lambda: page.texts("#queries tbody td.id") == [id])
    page.driver.execute_script("document.querySelector('tbody td').click()")
    assert wait(lambda: HOSTILE in page.texts("section pre"))
    assert not page.texts(":is(#first, #browse, #runs) :is(img, script, b, iframe)")
    assert page.driver.get_log("browser") == []
    assert page.driver.execute_script("return typeof hacked") == "undefined"
    logged = [json.loads(row["message"])["message"] for row in page.driver.get_log("performance")]
    sent = [row["params"] for row in logged if row["method"] == "Network.requestWillBeSent"]
    ours = [params["request"]["url"] for params in sent if params["documentURL"] == page.url]
    assert {url.partition(":")[0] for url in ours} == {"file", "data"}  # nothing of a network
    image = "<img src='data:,' onerror=hacked=1>"  # even markup that got in would not run
    page.driver.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", image)
    assert wait(lambda: "Content Security" in str(page.driver.get_log("browser")))
    assert page.driver.execute_script("return typeof hacked") == "undefined"
