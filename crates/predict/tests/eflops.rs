//! The EFLOPS article: what must be shown, at two sizes and two numbers of GPUs.

use std::sync::LazyLock;

use serde_json::{Value, json};

/// Takes some seconds: the tests share it.
static ARTICLE: LazyLock<Value> = LazyLock::new(|| {
    let spec = json!({
        "scenario": "eflops", "sizes": [1 << 10, 1 << 28], "ranks": [16, 64], "seeds": 1,
        "sensitivity": false,
    });
    let mut last = 0.0;
    let outcome = weft_predict::run(&spec.to_string(), &mut |share, _| {
        assert!((last..=1.0).contains(&share), "progress went from {last} to {share}");
        last = share;
        true
    });
    serde_json::from_str(&outcome.unwrap()).unwrap()
});

fn figure<'a>(results: &'a Value, name: &str) -> &'a Value {
    let rows = results["comparison"].as_array().unwrap();
    rows.iter()
        .find(|row| row["figure"].as_str().unwrap().starts_with(name))
        .unwrap_or_else(|| panic!("{name}"))
}

fn number(row: &Value, column: &str) -> f64 {
    row[column].as_f64().unwrap_or_else(|| panic!("{row} has no number for {column}"))
}

#[test]
fn the_article_comes_out_as_it_must() {
    let results = &ARTICLE["results"];
    let small = figure(results, "1 KiB: time of ring / HDRM");
    // Ideal: the ratio of steps, 126 / 12. Fitted: as published, where half of HDRM's time is no step's.
    assert!((number(small, "ideal") / 10.5 - 1.0).abs() < 0.02, "{small}");
    assert!((5.0..=8.0).contains(&number(small, "fitted")), "{small}");
    let bound = figure(results, "256 MiB: HDRM, share of the bandwidth bound");
    assert!(number(bound, "ideal") > 0.97, "{bound}");
    let hdrm = number(figure(results, "256 MiB: HDRM, Gb/s"), "fitted");
    let ring = number(figure(results, "256 MiB: ring"), "fitted");
    let hd = number(figure(results, "256 MiB: HD,"), "fitted");
    assert!((hdrm / 40.0 - 1.0).abs() < 0.05, "HDRM at {hdrm} Gb/s");
    assert!(hdrm > 1.05 * ring && ring > hd, "HDRM {hdrm}, ring {ring}, HD {hd}");
    let more = figure(results, "1 KiB: HDRM, 4096 GPUs");
    for column in ["ideal", "fitted"] {
        assert!(number(more, column) < 1.05, "{more}");
    }
    let order = figure(results, "1 KiB: from fast to slow");
    assert_eq!(order["fitted"], "hdrm < hd < tree < ring");
    let order = figure(results, "256 MiB: from fast to slow");
    let place =
        |name| order["fitted"].as_str().unwrap().split(" < ").position(|other| other == name);
    assert!(place("hdrm") < place("ring") && place("ring") < place("hd"), "{order}");
}

#[test]
fn hd_on_a_fat_tree_under_ecmp_is_slower_than_ring() {
    let rows = ARTICLE["results"]["sizes"].as_array().unwrap();
    for column in ["ideal", "fitted"] {
        let time = |algorithm: &str| {
            let row = rows.iter().find(|row| {
                row["column"] == column
                    && row["network"] == "fat-tree"
                    && row["algorithm"] == algorithm
                    && row["bytes"] == 1 << 28
            });
            number(row.unwrap(), "time_s")
        };
        assert!(time("hd") > 1.05 * time("ring"), "{column}");
    }
}

#[test]
fn a_published_figure_that_was_found_has_its_deviation() {
    for row in ARTICLE["results"]["comparison"].as_array().unwrap() {
        let (published, fitted) = (row["published"].as_f64(), row["fitted"].as_f64());
        if let Some((published, fitted)) = published.zip(fitted) {
            let deviation = row["fitted_deviation"].as_f64().unwrap();
            assert!((deviation - (fitted / published - 1.0)).abs() < 1e-12, "{row}");
            assert!(deviation.abs() < 0.25, "{row}");
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    for wrong in [json!({"ranks": [48]}), json!({"seeds": 0}), json!({"set": {"wait_s": -1}})] {
        let mut spec = json!({"scenario": "eflops"});
        spec.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        assert!(weft_predict::run(&spec.to_string(), &mut |_, _| true).is_err(), "{spec}");
    }
}
