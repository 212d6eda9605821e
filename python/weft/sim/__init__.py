"""Flow-level simulation: the Python half of `weft sim`.

The simulator is native (`crates/predict`) and maps a scenario to an outcome, both as JSON.

- `simulate`: runs one scenario
- `sweep`: grids of scenarios
- `plot`, `spans`: pictures
"""

from weft.sim.sweep import simulate

__all__ = ["simulate"]
