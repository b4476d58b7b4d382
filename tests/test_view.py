"""The HTML file of a run, in Debian's Chromium: it answers, and runs nothing."""

import shutil
import time
from collections.abc import Callable
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
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def show(driver, file: Path, run: Path) -> Callable[[str], list[str]]:
    """Open the file of a run in the browser; returns what reads the texts of a selector."""
    view((run,), file)
    driver.get(file.as_uri())
    read = "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)"
    return lambda selector: driver.execute_script(read, selector)


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
    texts = show(chromium, tmp_path / "view.html", oswft)
    chromium.find_element("xpath", "//td[text()='q0']").click()
    assert wait(lambda: texts("#browse section") and texts("#first section"))
    find = chromium.find_element
    shown, first = (find("css selector", f"#{id} section").text for id in ("browse", "first"))
    assert shown == first
    why = "1 of 2 answers right: p̂ = 0.5, so the solution's weight is 0.5 (--weighting oswft)"
    assert why in shown and "question q0" in shown
    assert "reference: 7\nthe expert's" in shown
    assert "Answer 1 · right · extracted: 7 · 3 tokens\nso \\boxed{7}" in shown
    assert "Answer 2 · wrong · extracted: 99 · 3 tokens, cut off\n9+5" in shown
    spans = chromium.find_elements("css selector", "#first section span")
    alphas = [float(s.value_of_css_property("background-color")[:-1].split(",")[3]) for s in spans]
    assert spans[1].text == "+" and alphas[1] > alphas[2] > alphas[0]  # the less likely, the redder


def test_nothing_that_a_model_wrote_is_run(chromium, tmp_path):
    id = "</script><img src=x onerror=hacked=1><!-- '\"</td>"
    batch = {id: [*answers(1, text=HOSTILE), *answers(0, text=HOSTILE, logprobs=[-1.0] * 3)]}
    texts = show(chromium, tmp_path / "view.html", write_run(tmp_path / "$x^$ <b>", batch))
    assert wait(lambda: texts("#queries tbody td.id") == [id])
    chromium.execute_script("document.querySelector('tbody td').click()")
    assert wait(lambda: HOSTILE in texts("section pre"))
    assert not texts(":is(#first, #browse, #runs) :is(img, script, b, iframe)")
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return typeof hacked") == "undefined"
    image = "<img src='data:,' onerror=hacked=1>"  # even markup that got in would not run
    chromium.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", image)
    assert wait(lambda: "Content Security" in str(chromium.get_log("browser")))
    assert chromium.execute_script("return typeof hacked") == "undefined"
