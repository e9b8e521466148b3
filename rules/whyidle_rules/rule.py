"""What a rule is: one cause, the evidence it needs, what it claims, and how it says so.

Rules are data (`builtin/<cause>/<id>.yaml`); `rule_load` reads them, `compile` turns all of them
into one query and `allocate` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from whyidle_rules.expression import Expression
from whyidle_rules.says import render

Grade = Literal["measured", "observed", "inferred"]
Owner = Literal["application", "infrastructure", "hardware", "config"]
Severity = Literal["info", "warning", "critical"]
Value = float | int | str | None

# How far around its window a column of evidence reaches, unless a rule says that it needs more.
LOOKBACK_S = 15.0
LOOKAHEAD_S = 10.0
# While a node records a second is charged once, from the minute before it and little after.
LOOKBACK_MOST_S = 60.0
LOOKAHEAD_MOST_S = 10.0
# Columns that tell of a longer time than their window, which a rule on them has to look back at.
LONG_COLUMNS: tuple[str, ...] = ("gap_s",)

# Columns that every window has, so that no rule has to list them under `needs`.
ALWAYS: tuple[str, ...] = ("d_s", "working_s", "empty_s", "spinning_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A number or text that a site may want to change, and why it has this value."""

    name: str
    value: float | int | str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Windows of evidence and the seconds that the rule must be granted on them; 0 is silence."""

    name: str
    rows: tuple[dict[str, Value], ...]
    grants_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule. Times are in seconds; `when`, `claim` and `share` are expressions over a window.

    `needs` are the columns that must be known, `lacks` those that must be unknown: a rule with
    `lacks` is the coarser answer of its cause where the finer one was not recorded, and claims what
    the finer rules would claim together. Exactly one of `claim`, `share` and `beside` is set: a
    `claim` in groups without a witness, a `share` (0 to 1 of the witness) in groups with one.
    `beside` are seconds that the rule tells of without a claim to them, such as slow work: it has
    no group, takes nothing and changes nothing in the ledger; `at_most` is then how grave its
    finding may be. `lookback_s` and `lookahead_s` are how far around a window its evidence may
    reach while a node records.
    """

    id: str
    title: str
    cause: str
    subcause: str
    group: str
    needs: tuple[str, ...]
    lacks: tuple[str, ...]
    grade: Grade
    params: tuple[Param, ...]
    when: Expression | None
    claim: Expression | None
    share: Expression | None
    says: str
    why: str
    advice: str
    owner: Owner
    refs: tuple[str, ...]
    cases: tuple[Case, ...]
    file: str
    beside: Expression | None = None
    at_most: Severity = "critical"
    lookback_s: float = LOOKBACK_S
    lookahead_s: float = LOOKAHEAD_S

    @property
    def amount(self) -> Expression:
        """The claim, the share or what is told beside the ledger, whichever the rule has."""
        amount = self.claim or self.share or self.beside
        assert amount is not None
        return amount

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that must be known before the rule speaks: `needs` and those computed on."""
        used = {*self.amount.columns, *(self.when.columns if self.when else ())}
        return tuple(dict.fromkeys([*self.needs, *sorted(used)]))

    def render_says(self, values: Mapping[str, object]) -> str:
        """Fill `says`.

        `values` holds what the template names: seconds columns, summed over the windows in which
        the rule was granted seconds; other columns, with the value under which most of those
        seconds were granted; idle_s (granted in all), share (of wall, 0 to 1), wall_s, ranks (text
        such as "0-2, 5"); of a rule beside the ledger beside_s and working_share instead of idle_s,
        and the means of other numbers. Parameters are filled in by the rule. None is written as
        "unknown"; a name that is missing raises KeyError.
        """
        params = {param.name: param.value for param in self.params}
        return render(self.says, {**params, **values})
