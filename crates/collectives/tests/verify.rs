//! Every schedule is what it says.

use weft_collectives::{Algorithm, Collective, Options, Schedule, build, verify};

#[test]
fn quick() {
    for ranks in 1..=70 {
        for algorithm in Algorithm::ALL {
            for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
                let Ok(s) = build(collective, *algorithm, ranks, &Options::default()) else { continue };
                let proof = verify(&s).unwrap_or_else(|e| panic!("{} {collective} {ranks}: {e}", s.name()));
                if ranks == 64 { println!("{proof}"); }
            }
        }
    }
}
