"""GEMMs fused with collectives: operators, tilings, float8 scales."""
