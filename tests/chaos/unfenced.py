"""The scripts without the fence: a turn settles whatever it reports, even from a worker that was removed.

Shows that the checker finds the consequences: CHAOS_MUTANT=unfenced in the environment of a run.
"""

import os

from tests.support.models.mutants import Mutant, use

MUTANT = "CHAOS_MUTANT"

_WRONG = "a turn settles what was given to others"
UNFENCED = (
    Mutant(
        "turn.lua",
        "  if not registered then return FENCED end\n",
        "  registered = registered or '0'\n",
        "chaos",
        _WRONG,
    ),
    Mutant(
        "turn.lua",
        "    if stored ~= owner then return false end\n",
        "    if not stored then return false end\n",
        "chaos",
        _WRONG,
    ),
    Mutant(
        "quick.lua",
        "  if redis.call('HGET', names.active, id) ~= worker .. ':' .. fence then return nil end\n",
        "  if not redis.call('HGET', names.active, id) then return nil end\n",
        "chaos",
        _WRONG,
    ),
    Mutant("failures.lua", "if owner == settler and record then", "if owner and record then", "chaos", _WRONG),
)


def use_what_is_asked_for() -> None:
    wanted = os.environ.get(MUTANT, "")
    if wanted not in ("", "unfenced"):
        raise SystemExit(f"{MUTANT}={wanted!r} is not allowed: 'unfenced', or nothing")
    if wanted:
        for mutant in UNFENCED:
            use(mutant)
