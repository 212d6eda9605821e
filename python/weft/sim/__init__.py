"""Flow-level simulation: the Python half of `weft sim`.

The simulator is native (`crates/predict`) and maps a scenario to an outcome, both as JSON.

- `simulate`: runs one scenario
- `schedule`: operations of a collective, as the simulator executes them
- `sweep`: grids of scenarios
- `plot`, `spans`: pictures
"""

from weft.sim.sweep import schedule, simulate

__all__ = ["schedule", "simulate"]
