"""The units that may stand after a number, and how many of one another is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Unit:
    """A product of powers of base units.

    Attributes:
        scale: how many of the base units' product it is: a kilometre is 1000 metres.
        powers: base units with their powers; `student` for what is counted.
    """

    scale: Fraction = Fraction(1)
    powers: Mapping[str, int] = field(default_factory=dict)

    def times(self, other: Unit, power: int = 1) -> Unit:
        """Return this unit times `other` to the power."""
        powers = dict(self.powers)
        for base, n in other.powers.items():
            powers[base] = powers.get(base, 0) + n * power
        return Unit(self.scale * other.scale**power, {base: n for base, n in powers.items() if n})

    def same_kind(self, other: Unit) -> bool:
        """Return whether both measure the same, so that one can be written in the other."""
        return dict(self.powers) == dict(other.powers)

    def read_as(self, other: Unit) -> Unit:
        """Return this unit, a `pound` in it being the one of mass or of money that `other` is of."""
        base = next((base for base in _POUNDS if base in other.powers), None)
        if base is None or "pound" not in self.powers:
            return self
        pounds = Unit(powers={"pound": 1}), Unit(_POUNDS[base], {base: 1})
        n = self.powers["pound"]
        return self.times(pounds[0], -n).times(pounds[1], n)


#: What a `pound` may be: base unit -> how many of them.
_POUNDS = {"gram": Fraction(45359237, 100000), "sterling": Fraction(1)}
#: Lines of: base unit, number of base units, its names. Names of one word get a plural on -s.
_MEASURES = """
metre 1 m meter metre
metre 1000 km kilometer kilometre
metre 1/10 dm decimeter decimetre
metre 1/100 cm centimeter centimetre
metre 1/1000 mm millimeter millimetre
metre 1/1000000 micrometer micrometre micron
metre 1/1000000000 nm nanometer nanometre
metre 254/10000 in inch inches
metre 3048/10000 ft foot feet
metre 9144/10000 yd yard
metre 1609344/1000 mi mile
gram 1 g gram gramme
gram 1000 kg kilogram kilo
gram 1/1000 mg milligram
gram 1000000 tonne
gram 45359237/100000 lb lbs
gram 45359237/1600000 oz ounce
pound 1 pound
sterling 1 £ GBP
ton 1 ton
second 1 s sec second
second 1/1000 ms millisecond
second 60 min minute
second 3600 h hr hrs hour
second 86400 day
second 604800 week
month 1 month
month 12 yr yrs year
month 120 decade
month 1200 century centuries
litre 1 L l liter litre
litre 1/1000 mL ml milliliter millilitre
litre 1/100 cL cl centiliter centilitre
gallon 1 gal gallon
gallon 1/4 qt quart
gallon 1/8 pt pint
gallon 1/16 cup
gallon 1/256 tbsp tablespoon
gallon 1/768 tsp teaspoon
dollar 1 $ dollar USD buck
dollar 1/100 ¢ cent penny pennies
dollar 1/20 nickel
dollar 1/10 dime
euro 1 € euro EUR
yen 1 ¥ yen JPY
rupee 1 ₹ rupee INR
yuan 1 yuan RMB CNY
peso 1 peso
franc 1 franc
degree 1 ° deg degree
degree 1/60 arcminute
degree 1/3600 arcsecond
radian 1 rad radian
kelvin 1 K kelvin
celsius 1 celsius
fahrenheit 1 fahrenheit
newton 1 N newton
joule 1 J joule
joule 1000 kJ kilojoule
joule 4184/1000 calorie cal
joule 4184 kcal kilocalorie
watt 1 W watt
watt 1000 kW kilowatt
volt 1 V volt
ampere 1 A amp ampere
ohm 1 Ω ohm
farad 1 farad
coulomb 1 coulomb
tesla 1 tesla
henry 1 henry
hertz 1 Hz hertz
pascal 1 Pa pascal
pascal 101325 atm atmosphere
mole 1 mol mole
joule 3600 Wh
joule 1602176634/10000000000000000000000000000 eV electronvolt
lumen 1 lumen
candela 1 candela
bit 1 bit
bit 8 byte B
hectare 1 ha hectare
acre 1 acre
revolution 1 rev revolution
decibel 1 dB decibel
unit 1 unit
"""
#: Symbols that take the prefixes of the SI, beside those that stand above.
_PREFIXED = {"F": "farad", "C": "coulomb", "T": "tesla", "H": "henry"} | {
    symbol: symbol
    for symbol in ("m", "g", "s", "L", "N", "J", "W", "V", "A", "Ω", "Hz", "Pa", "mol", "Wh", "eV", "B")
}
#: Without pico: `pm` is a half of the day.
_SI_PREFIXES = {"n": -9, "μ": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12}
#: What is counted, in the singular where the plural is regular.
_COUNTED = """
apple orange banana pear peach plum cherry cherries berry berries grape lemon lime melon mango fruit vegetable carrot
potato potatoes tomato tomatoes onion pepper bean egg cookie cake cupcake pie pizza slice piece bread loaf loaves
sandwich sandwiches candy candies chocolate bar muffin donut doughnut bagel pancake roll meal dish dishes snack drink
bottle can jar glass glasses bag box boxes basket crate carton packet pack package bucket barrel tray plate bowl
spoon fork knife knives book page chapter paragraph sentence word letter character magazine newspaper article card
ticket stamp coin bill note sticker poster photo photograph picture painting song movie film game toy doll puzzle
marble ball balloon block brick tile bead button ribbon string rope stick pencil pen crayon marker eraser notebook
folder paper sheet pad desk chair table lamp bed window door room floor wall house home building apartment office
school class classes classroom course lesson student pupil teacher professor child children kid boy girl man men
woman women person people adult player team member friend guest visitor customer passenger worker employee
engineer doctor nurse soldier farmer driver rider runner swimmer dancer singer actor winner loser candidate vote
voter citizen resident family families couple group row column seat table car truck bus buses van bike bicycle
motorcycle train plane airplane boat ship wheel tire engine animal dog cat puppy puppies kitten rabbit horse cow pig
sheep goat chicken hen duck goose geese turkey bird fish fishes frog turtle snake spider ant bee butterfly
butterflies insect lion tiger bear monkey elephant mouse mice deer wolf wolves tree flower rose plant leaf leaves
seed branch branches bush bushes garden field farm acre park street road bridge city cities town village state
country countries island lake river mountain star planet way arrangement permutation combination outcome solution
root value number integer digit divisor factor multiple fraction point vertex vertices edge face side angle
triangle square rectangle circle pentagon hexagon octagon polygon quadrilateral cube sphere line segment ray plane
region area intersection pair subset set element function sequence term path route step move turn trip lap mile
hour problem question answer test exam quiz quizzes mark grade goal win loss losses draw match matches round
tournament race shot hit run try shirt hat shoe sock dress dresses coat jacket skirt glove scarf scarves pants
job task project phone computer laptop tablet camera robot machine device battery batteries light bulb key shell
rock stone pebble gem diamond ring necklace bracelet cell molecule atom electron proton neutron ion gene bacterium
bacteria widget item object thing product order sale copy copies layer level story stories handshake call message
email code password tower rook queen king bishop knight pawn domino dominoes dice die color colour shade cycle leg arm head hand finger toe eye tooth teeth ear nail screw bolt tool
wire pipe tank token coupon gift present invitation candle flag badge medal trophy trophies prize award chip nut
committee diagonal palindrome coloring colouring configuration labeling labelling tiling selection possibility possibilities
choice partition chord arc matching polynomial triple quadruple symmetry symmetries olive pumpkin watermelon strawberry strawberries blueberry blueberries burger taco blanket pillow towel magnet log
plank board pearl sibling brother sister son daughter parent grandchildren cousin twin tourist fan artist chef baker
officer scout camper hiker cyclist skater golfer tuple lattice prime shirt sweater shoes sandal boot cap bear
ladder shelf shelves drawer cabinet cage nest hive web trail stop station platform bench booth stall shop store
market factory factories warehouse hotel library libraries museum park church hospital
"""
#: Stands before or behind what is counted or measured: "3 red balls", "5 years old".
ADJECTIVES = frozenset(
    [
        "different",
        "distinct",
        "unique",
        "possible",
        "total",
        "whole",
        "equal",
        "additional",
        "extra",
        "remaining",
        "new",
        "old",
        "large",
        "small",
        "big",
        "red",
        "blue",
        "green",
        "white",
        "black",
        "yellow",
        "brown",
        "pink",
        "purple",
        "gray",
        "grey",
    ]
)
#: The same for numbers that are counted.
_OF_NUMBERS = frozenset(
    ["ordered", "unordered", "consecutive", "real", "positive", "negative", "nonzero", "odd", "even"]
)
#: What is not counted, but measured: it may stand after "of".
_SUBSTANCES = """
water milk juice flour sugar salt rice sand gold silver paint soda coffee tea lemonade gum candy chocolate corn wheat
butter cheese meat wood fabric cloth wire tape soap oil gas gasoline fuel ice air acid solution work fun soup cereal
punch cream wool yarn fencing fence concrete gravel dirt soil money
"""
_SINGULAR_ON_S = frozenset(["s", "glass", "class", "bus", "ms", "lbs", "gas", "lens", "dress", "loss"])
_ROOTS = frozenset(["root", "roots"])
_PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIXES = {"squared": 2, "cubed": 3}
#: Numerals that stand after a number and multiply it.
MULTIPLIERS: Mapping[str, int] = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "dozens": 12,
    **{f"{name}s": 10**n for name, n in (("hundred", 2), ("thousand", 3), ("million", 6), ("billion", 9))},
}
#: Words of closed classes (numerals, conjunctions, negations, times of day): no unit, in whoever's answer they stand.
_NO_UNIT = """
north south east west up down left forward backward ahead ago late later early earlier before after am pm noon
midnight o clock or and to not no is are was isn never maybe perhaps possibly approximately about around roughly
almost nearly over under between at least most more less than fewer greater unless except if when but wrong
right correct incorrect false true squared cubed half halves third thirds quarter quarters fourth fourths fifth
fifths sixth sixths tenth tenths hundredth hundredths thousandth thousandths st nd rd th score mod modulo plus
minus times divided by the a an of in with without each percent percentage remainder base factorial choose
"""
_SPECIAL = {
    "mph": ("mile", "hour"),
    "kph": ("km", "hour"),
    "kmh": ("km", "hour"),
    "rpm": ("revolution", "minute"),
    "fps": ("foot", "second"),
    "mps": ("m", "s"),
}


def _known() -> dict[str, Unit]:
    units = {}
    for line in _MEASURES.strip().splitlines():
        base, scale, *names = line.split()
        unit = Unit(Fraction(scale), {base: 1})
        for name in names:
            units[name] = unit
            if len(name) > 2:
                units.setdefault(name + "s", unit)
    units |= {name: unit for name, unit in _with_si_prefixes(units).items() if name not in units}
    for name in _COUNTED.split():
        units.setdefault(name, Unit(powers={_singular(name): 1}))
        units.setdefault(name + "s", Unit(powers={_singular(name): 1}))
    for name, (above, below) in _SPECIAL.items():
        units[name] = units[above].times(units[below], -1)
    return units


def _with_si_prefixes(units: Mapping[str, Unit]) -> dict[str, Unit]:
    return {
        prefix + symbol: Unit(units[name].scale * Fraction(10) ** n, units[name].powers)
        for symbol, name in _PREFIXED.items()
        for prefix, n in _SI_PREFIXES.items()
    }


def _singular(name: str) -> str:
    if name in _SINGULAR_ON_S or not name.endswith("s"):
        return name
    return name[:-1]


_UNITS = _known()
#: As plain letters they are rather the product of two variables: `nF`, `MN`.
_ONLY_MARKED = frozenset(name for name in _with_si_prefixes(_UNITS) if len(name) == 2) - frozenset(
    ["km", "mm", "nm", "kg", "mg", "ms", "mL", "kJ", "kW"]
)
_MONEY = frozenset(["dollar", "euro", "yen", "rupee", "yuan", "peso", "franc", "sterling"])
_MEASURED = frozenset(line.split()[0] for line in _MEASURES.strip().splitlines()) - _MONEY - {"unit"}
_CLOSED_CLASS = frozenset(_NO_UNIT.split())


def is_unit_word(word: str, *, marked: bool = True) -> bool:
    r"""Return whether `word` may be part of a unit, multiplies the number before it, or names a time of day.

    Args:
        word: a run of letters.
        marked: whether it stands in `\text` or the like.
    """
    lower = word.lower()
    return (
        (word in _UNITS and (marked or word not in _ONLY_MARKED))
        or (len(word) > 2 and lower in _UNITS)
        or lower in MULTIPLIERS
        or lower in _PREFIXES
        or lower in _SUFFIXES
        or lower in ("per", "percent", "am", "pm")
        or lower in ("st", "nd", "rd", "th")
    )


def named(word: str, *, trusted: bool) -> Unit | None:
    """Return the unit that `word` names; where `trusted`, what it counts if it is no known unit and no numeral."""
    unit = _UNITS.get(word) or (_UNITS.get(word.lower()) if len(word) > 2 else None)
    if unit is None and trusted and word.isalpha() and len(word) > 2 and word.lower() not in _CLOSED_CLASS:
        return Unit(powers={_singular(word.lower()): 1})
    return unit


def _is_money(unit: Unit) -> bool:
    return not _MONEY.isdisjoint(unit.powers)


def _is_counted(unit: Unit) -> bool:
    """Return whether a unit is of money or of what is counted, rather than measured."""
    return not any(base in _MEASURED for base in unit.powers)


def _is_substance(word: str) -> bool:
    return word.lower() in _SUBSTANCES.split() or named(word, trusted=False) is not None


def read_unit(words: Sequence[str], *, trusted: bool) -> Unit | None:
    """Return the unit that `words`, among them `/`, `per`, `*`, `(`, `)` and powers as `^2`, name; None for none.

    Args:
        words: `["square", "miles", "per", "hour"]`, `["m", "/", "s", "^2"]`.
        trusted: whether unknown words are what is counted, as in a label.
    """
    unit, sign, power, found = Unit(), 1, 1, False
    last: Unit | None = None
    for i, word in enumerate(words):
        lower = word.lower()
        if word.startswith("^"):
            if last is None or not found:
                return None
            unit = unit.times(last, sign * (int(word[1:]) - 1))
            last = None
        elif word == "/" or (lower in ("per", "an", "a") and found):
            sign, last = -1, None
        elif lower == "of" and found:
            return unit if i + 1 < len(words) and all(map(_is_substance, words[i + 1 :])) else None
        elif word == "*":
            last = None
        elif lower in _PREFIXES:
            power = _PREFIXES[lower]
        elif lower in _SUFFIXES:
            if last is None or ("metre" not in last.powers and "unit" not in last.powers):
                return None
            unit = unit.times(last, sign * (_SUFFIXES[lower] - 1))
            last = None
        elif lower in ADJECTIVES or lower in _OF_NUMBERS:
            continue
        else:
            # `meters east` is no unit of metres: an unknown word does not follow a known one.
            before, last = (
                last,
                named(word, trusted=trusted and (i == 0 or named(words[i - 1], trusted=False) is None)),
            )
            if last is None or (before is not None and before.same_kind(last)):
                return None  # `cm cm` is a slip
            if i and (
                (lower in _ROOTS and words[i - 1].lower() in ("square", "cube", "cubic"))
                or (before is not None and (len(words[i - 1]) < 3 or _is_money(last)) and _is_counted(last))
            ):
                return None  # `K dollars` are a thousand, and a square root is no unit
            unit = unit.times(last, sign * power)
            power, found = 1, True
    return unit if found and power == 1 else None
