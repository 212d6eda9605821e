"""Flow-level simulation: the Python half behind `weft sim`.

The simulator is native (`crates/predict`) and maps a scenario to an outcome, both as JSON.

- `simulate`: runs one scenario
- `schedule`: a collective's operations, as the simulator executes them
- `sweep`: scenario grids
- `plot`, `spans`: pictures
"""

from weft.sim.sweep import schedule, simulate

__all__ = ["schedule", "simulate"]
