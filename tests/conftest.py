import hypothesis

# Machines are shared and busy: how long an example takes says nothing about it.
hypothesis.settings.register_profile("weft", deadline=None, print_blob=True)
hypothesis.settings.load_profile("weft")
