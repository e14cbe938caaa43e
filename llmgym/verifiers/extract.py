"""Which part of a response is its answer.

1. What was thought is not said: only text behind the last ``</think>`` counts, and a response that is still
   in ``<think>`` has no answer.
2. A response that has stated an answer and then opens another question (a line "Question:", "Q:", "Problem:",
   "Human:" or "User:") is read up to there.
3. The last marker that states something decides: ``####``, ``\\boxed{}`` (or ``\\fbox{}``), ``A:``,
   "Answer:", "the answer is", ``<answer>``. A marker with nothing behind it (as when the prompt is recited)
   states nothing, and a box that is never closed leaves no answer.
4. Without a marker a response that is nothing but an expression is the answer, and in prose the last number
   or formula, unless it is denied ("not 7"). Numbers in a row ("1, 2 or 3") are one answer: a list.
5. Only markers, no answer behind any: None.
"""

from __future__ import annotations

import re

from llmgym.verifiers.exact import DECIMAL
from llmgym.verifiers.normalise import MAX_CHARS, MAX_NESTING, MAX_PLAIN, OverLimits

MAX_RESPONSE = 200_000  # characters; a longer response is over the limits
TAIL = 2_000  # characters behind a marker, or at the end of a response without one, that are looked at
RUN_ON = re.compile(r"(?:^|\n)[\s*#]*(?:Q|Question(?: \d+)?|Problem(?: \d+)?|Human|User)\**:")
RUN_ON_HEADS = ("Q:", "Question", "Problem", "Human", "User")
MARKER = re.compile(
    r"####+"
    r"|\\(?:boxed|fbox)(?![A-Za-z])"
    r"|<answer>"
    r"|(?<![\w\\])A\s?:(?![A-Za-z:])"
    r"|(?<![A-Za-z])(?:final )?answer(?: \([^()\n]{1,40}\))?(?: to [^\n.:]{1,40}?)?\s?[*_]{0,2}\s?"
    r"(?:(?:is|was|are|equals|=|(?:would|will|must|should) be)\b\s?:?|:|=|\n)",
    re.IGNORECASE,
)
SIGN = re.compile(r"####+|\\(?:boxed|fbox)(?![A-Za-z])")
ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BARE = re.compile(r"[-+]?[0-9][0-9.,/]*|[A-Za-z]\b")  # \boxed 5
MAX_BOX = MAX_PLAIN + 100
INLINE = re.compile(
    r"\$\$([^$]{1,400})\$\$|\$([^$\n]{1,400})\$|\\\(([^()]{1,400}?)\\\)|\\\[([^\[\]]{1,400}?)\\\]"
)
SENTENCE_END = re.compile(
    r"[.!?](?=\s|$)|\n|;|<|,?\s(?:because|since|which|where|as)\b|,\s+(?!and\b|or\b)(?=[A-Za-z]{2})"
)
DIGIT = re.compile(r"[\d½¼¾⅓⅔⅕⅛]")
WORDS = re.compile(r"(?:[A-Za-z']{2,}|[aI])\b")
# Atomic and possessive: text that nearly fits must not be tried in every other way.
NUMBER = (
    rf"(?>{DECIMAL})(?:\s?[eE][-+]?[0-9]+(?![\w.]))?(?: [0-9]+/[0-9]+|\s?/\s?[0-9]+(?:\.[0-9]+)?)?"
    r"(?:\s?(?:[×x*·]|\\times|\\cdot)\s?10\s?\^?\s?(?:\{[-+−]?[0-9]+\}|[-+−]?[0-9]+|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+))?"
    r"(?:\s?\\?%| percent\b| per cent\b| (?:thousand|million|billion|trillion)\b)?"
)
SIGNED = rf"(?:[-+−–]\s?)?[$€£¥₹]?\s?(?:[-+−])?{NUMBER}"
LINK = r"(?:,? (?:or|and|to) |, ?|\s?[-–]\s?)"
CHAIN = re.compile(
    rf"(?<![\w.^_\\,/(])(?<![0-9]-)(?>{SIGNED})(?:{LINK}(?>{SIGNED}))*+"
    r"(?![0-9]|\.[0-9]|[_^(\\])(?:(?=[^A-Za-z])|$|(?=[a-z]{2}))"
)
FORMULA = re.compile(r"[\\^]|[A-Za-z]\)?\s?=")
FUNCTION_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")
DENIED = re.compile(r"(?:\bnot|n't|rather than|instead of|never)\s+(?:be\s|equal\s)?$", re.IGNORECASE)
PLAIN_HEAD = re.compile(r"[-+]?[0-9]{500,}(?![^\s])")  # longer than any other answer may be
PROSE = re.compile(r"(?<!\\)\b[A-Za-z]{3,}|[.,;:!?]\s|\n")
MATH_ONLY = re.compile(r"[-+(\[{\\$0-9.∞√π−∅]")


def answer_text(response: str) -> str | None:
    """The answer of a response as it was written, or None: the module's docstring has the rules.

    Linear in the length of the response. Raises OverLimits for one of more than MAX_CHARS characters that is
    one expression.
    """
    if "<think>" in response or "</think>" in response:
        if response.rfind("<think>") > response.rfind("</think>"):
            return None
        response = response[response.rfind("</think>") + len("</think>") :]
    if "<<" in response:
        response = ANNOTATION.sub("", response)
    # Nearly always the last sign of a marker is enough, and a million of them before it cost nothing.
    last = max(response.rfind("####"), response.rfind("\\boxed"), response.rfind("\\fbox"))
    if last >= 0 and not any(head in response for head in RUN_ON_HEADS):
        answer, certain = last_marked(response, markers_from(response, last))
        if certain:
            return answer
    markers = markers_from(response, 0)
    if markers and any(head in response for head in RUN_ON_HEADS):
        response, markers = without_run_on(response, markers)
    answer, certain = last_marked(response, markers)
    return answer if markers or certain else unmarked(response.strip())


def markers_from(response: str, at: int) -> list[tuple[int, int]]:
    """Start and end of every marker from `at` on."""
    tail = response[at:]
    if "A:" not in tail and "A :" not in tail and "answer" not in tail.lower():
        # The words are what takes time to look for.
        return [(match.start(), match.end()) for match in SIGN.finditer(response, at)]
    return [(match.start(), match.end()) for match in MARKER.finditer(response, at)]


def last_marked(response: str, markers: list[tuple[int, int]]) -> tuple[str | None, bool]:
    """The answer behind the last marker that states one, and whether there is such a marker."""
    end = len(response)
    for start, content in reversed(markers):
        if response[start] == "\\":
            answer = box_content(response, content)
            if answer is None:
                return None, True
        elif response[start] == "#":
            answer = marked(response[content:end].split("\n", 1)[0])
        else:
            answer = marked(response[content:end])
        if answer:
            return answer, True
        end = start
    return None, False


def without_run_on(response: str, markers: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """The response up to where it opens a question of its own, with the markers up to there."""
    first = RUN_ON.search(response)
    if first is None or first.start() < markers[0][1]:
        return response, markers  # it recites an example before its answer
    return response[: first.start()], [marker for marker in markers if marker[0] < first.start()]


def box_content(response: str, at: int) -> str | None:
    """What is in the braces that open behind `at`, "" for an empty box, None where they never close."""
    while at < len(response) and response[at].isspace():
        at += 1
    if at == len(response) or response[at] != "{":  # \boxed 5
        match = BARE.match(response, at)
        return match.group().rstrip(".,") if match else ""
    depth = 0
    for match in BRACE.finditer(response, at, at + MAX_BOX):
        brace = match.group()
        if brace == "{":
            depth += 1
        elif brace == "}":
            depth -= 1
            if depth == 0:
                return response[at + 1 : match.start()].strip()
        if depth > 2 * MAX_NESTING:
            raise OverLimits("braces nested too deeply")
    if at + MAX_BOX < len(response):
        raise OverLimits(f"a box of more than {MAX_BOX} characters")
    return None


def marked(text: str) -> str:
    """The answer in what follows a marker; "" where nothing is stated."""
    text = text.strip(" \t\r\n\v\f\0*_:`\u200b\ufeff")
    if len(text) > TAIL:
        head = PLAIN_HEAD.match(text)
        if head:
            return head.group()
        text = text[:TAIL]
    inline = INLINE.match(text)
    if inline and not text[inline.end() :].lstrip()[:1].isdigit() and "\\" not in text[inline.end() :][:2]:
        return next(group for group in inline.groups() if group).strip()
    if not DIGIT.search(text):
        formula = not WORDS.match(text) and MATH_ONLY.search(text)
        return clause(text) if formula or len(clause(text)) == 1 else ""
    if WORDS.match(text) and "=" not in clause(text):
        return last_stated(clause_with_digit(text)) or ""
    return clause(text)


def clause(text: str) -> str:
    """`text` up to the end of its first clause."""
    match = SENTENCE_END.search(text)
    return (text if match is None else text[: match.start()]).lstrip(" \t*_`:").rstrip(" \t*_`,.:")


def clause_with_digit(text: str) -> str:
    """The first line of `text` that holds a digit."""
    return next((line for line in text.splitlines() if DIGIT.search(line)), "")


def unmarked(text: str) -> str | None:
    """The answer of a response without markers."""
    if not text:
        return None
    if MATH_ONLY.match(text) and not PROSE.search(text, 0, MAX_CHARS):
        return text.strip("$ ").rstrip(".") or None
    return last_stated(text[-TAIL:])


def last_stated(text: str) -> str | None:
    """The last number, list of numbers or formula of a piece of prose that is not denied."""
    found = None
    for match in CHAIN.finditer(text):
        if not DENIED.search(text[max(0, match.start() - 20) : match.start()]):
            found = match
    formula = None
    for match in INLINE.finditer(text):
        inner = next(group for group in match.groups() if group)
        # Dollar signs are money too: "$10 + $5 = $15" holds no formula.
        glued = match.group()[0] == "\\" or not (inner[0].isspace() or inner[-1].isspace())
        if glued and FORMULA.search(inner) and not FUNCTION_WORD.search(inner):
            formula = match
    if formula and (found is None or found.start() < formula.end()):
        return next(group for group in formula.groups() if group).strip()
    return None if found is None else found.group().strip()
