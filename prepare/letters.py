r"""What curation reads and writes of option letters.

    option_labels("Pick. (A) 1 (B) 2")             # "AB"
    final_letter("So the answer is (C).")          # "C"
    end_in_box(r"So $\boxed{\text{(C)}}$.", "C")   # r"So \boxed{C}"

What a box names is decided in verify.py, for curation as for training.
"""

import re

from verify import CLOSING_CHARS, FONTS, SPACES, boxes, read_letter, said_letter

LABEL_STYLES = (  # how a question labels its options; it keeps to one style
    r"(?<![A-Za-z])[(\[（] ?([A-J]) ?[)\]）]",  # (A) [A]
    r"(?<![A-Za-z(\[])([A-J]) ?[).:．、：）](?![A-Z]\.)",  # A. A) A: but not "A.M."
)
ENCLOSING = (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)"), ("**", "**"))  # of a box


def option_labels(question: str) -> str:
    r"""The labels of a question's options, e.g. "ABCDE", or "" if it has fewer than two.

    Reads `(A)`, `A.`, `A)`, `A:`, `\textbf{(A)}` and the like, in one style and in order from A.
    """
    text = re.sub(rf"{SPACES}|\\[hv]space\*?{{[^{{}}]*}}|\\\\", " ", question)
    text = re.sub(rf"{FONTS}|\\left|\\right|[{{}}$*]", "", text)
    longest = ""
    for style in LABEL_STYLES:
        labels = ""
        for letter in re.findall(style, text):
            if letter == "ABCDEFGHIJ"[len(labels) :][:1]:  # not the next one: part of the text
                labels += letter
        longest = max(longest, labels, key=len)
    return longest if len(longest) > 1 else ""


def final_letter(text: str) -> str | None:
    """The one option letter that a text ends in, or None if it ends in none or names several."""
    letters = [
        read_letter(text[start:end]) if end - start < CLOSING_CHARS else None
        for start, end in boxes(text)
    ]
    if letters:
        return letters[-1] if set(letters) <= {letters[-1], None} else None
    return said_letter(text[-CLOSING_CHARS:])


def end_in_box(text: str, letter: str) -> str:
    r"""The text with a plain `\boxed{C}` as its end.

    If the text already ends in a box, the plain one replaces it, together with the dollars or
    stars around it. Otherwise the plain one is appended.
    """
    plain = rf"\boxed{{{letter}}}"
    if spans := boxes(text):
        start, end = spans[-1]
        before, after = text[: text.rindex("\\", 0, start)], text[end + 1 :].strip(" \n.")
        for opening, closing in ENCLOSING:
            if before.rstrip().endswith(opening) and after.startswith(closing):
                before = before.rstrip().removesuffix(opening)
                after = after.removeprefix(closing).strip(" \n.")
        if not after:
            return before + plain
    return f"{text}\n\n{plain}"
