"""Units and other words behind a number."""

from __future__ import annotations

import re

# Names of one unit, the first being how it is compared. Anything else behind a number is a remark.
NAMES = (
    "$ dollar dollars usd buck bucks", "€ euro euros eur", "£ gbp quid", "¥ yen jpy", "₹ rupee rupees inr",
    "cent cents c ¢", "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres", "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres", "inch inches in", "foot feet ft", "yard yards yd",
    "mile miles mi", "mg milligram milligrams", "g gram grams", "kg kilogram kilograms kilo kilos",
    "ton tons tonne tonnes", "ounce ounces oz", "pound pounds lb lbs", "ml milliliter milliliters millilitre",
    "l liter liters litre litres", "gallon gallons gal", "quart quarts", "pint pints", "cup cups",
    "second seconds s sec secs", "minute minutes min mins", "hour hours h hr hrs", "day days", "week weeks",
    "month months", "year years yr yrs", "° degree degrees deg", "radian radians rad",
    "mph", "kmh kph", "watt watts w", "kw", "kwh", "volt volts", "hz", "joule joules j",
)  # fmt: skip
UNITS = {name: names.split()[0] for names in NAMES for name in names.split()}
# Words that make "5 WORD" another number, a choice between numbers, or a denial.
NO_REMARK = {
    word
    for words in (
        "e i pi x or to plus minus times over sqrt root log ln sin cos tan inf infinity nan squared cubed",
        "half halves third thirds fourth fourths fifth fifths tenth tenths hundredth hundredths factorial",
        "mod point negative not no wrong incorrect isn't never except without",
        "hundred thousand million billion trillion",
    )
    for word in words.split()
}
UNIT = re.compile(
    r"(?:square|sq\.?|cubic) +([a-z]+)|([a-z]+|[$€£¥₹¢°])(?: ?\^ ?\{? ?([0-9]) ?\}?)?", re.IGNORECASE
)
WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
REMARK_CHARS = re.compile(r"(?:[^\W\d_]|[ .,!?;:'\"/()*-])*")
POWER = re.compile(r"\^ ?\{? ?[23] ?\}?")


def split_unit(text: str) -> tuple[str | None, str]:
    """The unit in what stands behind a number, and the rest that is neither unit nor remark.

    ("cm", "") for " cm"; ("cm^2", "") for " cm^2" and " square cm"; (None, "") for " apples" and "."; for
    anything that can change the number, such as letters glued to it that name no unit, the rest is not empty.
    """
    if text.startswith("!"):
        return None, text  # a factorial
    tail = text.strip(" .!?,;:*'\"")
    if not tail:
        return None, ""
    tail = tail.strip("{}").strip()
    glued = text[0] not in " .,!?;:{"
    match = UNIT.match(tail)
    unit = None
    if match:
        squared = tail[:2].lower() == "sq"
        name = (match.group(1) or match.group(2)).lower()
        exponent = match.group(3) or (("2" if squared else "3") if match.group(1) else "")
        unit = UNITS.get(name)
        if unit is None and not match.group(1) and len(name) == 1:
            return None, text  # a variable
        if unit and exponent:
            unit = f"{unit}^{exponent}"
    if glued and (unit is None or (len(tail) == 1 and tail.isascii() and tail not in "$")):
        return None, text  # 5x and 5m are products; 5cm and 5° are not
    remark = POWER.sub("", tail)
    if not REMARK_CHARS.fullmatch(remark.replace("°", "").replace("$", "").replace("¢", "").replace("€", "")):
        return None, text
    words = [word.lower() for word in WORD.findall(remark)]
    if unit is None and (not words or remark[0] in "/*-("):
        return (None, "") if not words and not remark.strip("()*/-") and "(" not in remark else (None, text)
    if any(word in NO_REMARK for word in words) or (words and len(words[0]) == 1 and unit is None):
        return None, text
    if "/" in remark or " per " in f" {remark} ":
        unit = None if unit is None else "/".join(UNITS.get(word, word) for word in words if word != "per")
    return unit, ""
