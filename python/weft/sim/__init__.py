"""What runs on a network would take: the Python half of `weft sim`.

The simulator is native (`crates/predict`): scenarios go in and outcomes come out as JSON. Here are
the specifications, the sweeps, the tables beside what was published, and the pictures.
"""
