//! Runs a scenario from a file or standard input, and prints the outcome.

use std::io::Read;

fn main() {
    let mut spec = String::new();
    match std::env::args().nth(1) {
        Some(path) => spec = std::fs::read_to_string(path).expect("the file can be read"),
        None => {
            std::io::stdin().read_to_string(&mut spec).expect("standard input can be read");
        }
    }
    match weft_predict::run(&spec, &mut |_, _| true) {
        Ok(outcome) => println!("{outcome}"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}
