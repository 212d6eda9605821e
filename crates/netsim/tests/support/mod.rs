//! Helpers for rate tests: max-min fair shares in exact arithmetic, and the definition.
#![allow(dead_code, reason = "each test file uses a part")]

use std::cmp::Ordering;
use std::ops::{Div, Mul, Sub};
use weft_netsim::{Engine, Link, LinkId, PathId};

/// A fraction in lowest terms, with a positive denominator. Overflow panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fraction(i128, i128);

impl Fraction {
    pub fn new(numerator: i128, denominator: i128) -> Fraction {
        let divisor = gcd(numerator.abs(), denominator.abs()).max(1) * denominator.signum();
        Fraction(numerator / divisor, denominator / divisor)
    }

    pub fn whole(number: u64) -> Fraction {
        Fraction(i128::from(number), 1)
    }

    pub fn to_f64(self) -> f64 {
        self.0 as f64 / self.1 as f64
    }
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Sub for Fraction {
    type Output = Fraction;

    fn sub(self, other: Fraction) -> Fraction {
        let (left, right) = (self.0.checked_mul(other.1), other.0.checked_mul(self.1));
        let numerator = left.unwrap().checked_sub(right.unwrap()).unwrap();
        Fraction::new(numerator, self.1.checked_mul(other.1).unwrap())
    }
}

impl Mul for Fraction {
    type Output = Fraction;

    fn mul(self, other: Fraction) -> Fraction {
        let numerator = self.0.checked_mul(other.0).unwrap();
        Fraction::new(numerator, self.1.checked_mul(other.1).unwrap())
    }
}

impl Div<u64> for Fraction {
    type Output = Fraction;

    fn div(self, by: u64) -> Fraction {
        Fraction::new(self.0, self.1.checked_mul(i128::from(by)).unwrap())
    }
}

impl PartialOrd for Fraction {
    fn partial_cmp(&self, other: &Fraction) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Fraction {
    fn cmp(&self, other: &Fraction) -> Ordering {
        let (left, right) = (self.0.checked_mul(other.1), other.0.checked_mul(self.1));
        left.unwrap().cmp(&right.unwrap())
    }
}

/// Exact max-min fair rates for flows over these links, by progressive filling.
pub fn exact_rates(bandwidths: &[u64], flows: &[&[u32]]) -> Vec<Fraction> {
    let mut left: Vec<Fraction> = bandwidths.iter().map(|&b| Fraction::whole(b)).collect();
    let mut rates: Vec<Option<Fraction>> = vec![None; flows.len()];
    loop {
        let open = |link: usize| {
            let on_link = |flow: &usize| flows[*flow].contains(&(link as u32));
            (0..flows.len()).filter(|&flow| rates[flow].is_none()).filter(on_link).collect()
        };
        let shares = (0..left.len()).filter_map(|link| {
            let flows: Vec<usize> = open(link);
            (!flows.is_empty()).then(|| (left[link] / flows.len() as u64, flows))
        });
        let Some((share, settled)) = shares.min_by_key(|&(share, _)| share) else { break };
        for flow in settled {
            rates[flow] = Some(share);
            for &link in flows[flow] {
                left[link as usize] = left[link as usize] - share;
            }
        }
    }
    rates.into_iter().map(|rate| rate.expect("every flow has a link")).collect()
}

/// Checks that rates are max-min fair: no link exceeds its bandwidth, and each flow has a saturated link on which no
/// flow is faster.
pub fn check_fair(bandwidths: &[f64], flows: &[(&[u32], f64)]) -> Result<(), String> {
    const SAME: f64 = 1e-7;
    let mut load = vec![0.0; bandwidths.len()];
    let mut fastest = vec![0.0_f64; bandwidths.len()];
    for &(links, rate) in flows {
        for &link in links {
            load[link as usize] += rate;
            fastest[link as usize] = fastest[link as usize].max(rate);
        }
    }
    for (link, (&load, &bandwidth)) in load.iter().zip(bandwidths).enumerate() {
        if load > bandwidth * (1.0 + SAME) {
            return Err(format!("link {link} carries {load} of {bandwidth}"));
        }
    }
    for (flow, &(links, rate)) in flows.iter().enumerate() {
        let bottleneck = links.iter().map(|&link| link as usize).any(|link| {
            load[link] >= bandwidths[link] * (1.0 - SAME) && rate >= fastest[link] * (1.0 - SAME)
        });
        if !bottleneck {
            return Err(format!("flow {flow} over {links:?} at {rate} has no bottleneck"));
        }
    }
    Ok(())
}

/// An engine on links with these bandwidths, without latency.
pub fn engine(bandwidths: &[f64]) -> Engine {
    let link = |&bandwidth: &f64| Link { bandwidth, latency: 0.0 };
    Engine::new(&bandwidths.iter().map(link).collect::<Vec<_>>()).unwrap()
}

/// A path by link numbers.
pub fn path(engine: &mut Engine, links: &[u32]) -> PathId {
    let links: Vec<LinkId> = links.iter().map(|&link| LinkId(link)).collect();
    engine.add_path(&links).unwrap()
}
