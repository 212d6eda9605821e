//! The article's models by name, wherever a scenario trains one.

use serde_json::Value;

use super::applications::MODELS;
use super::published::DATA;
use crate::error::Error;

/// Puts models in the place of their names.
pub(crate) fn name_models(scenario: &mut Value) -> Result<(), Error> {
    if let Some(job) = scenario.get_mut("job") {
        name_model(job)?;
    }
    if let Some(Value::Array(jobs)) = scenario.get_mut("jobs") {
        for job in jobs {
            if let Some(job) = job.get_mut("train") {
                name_model(job)?;
            }
        }
    }
    Ok(())
}

fn name_model(job: &mut Value) -> Result<(), Error> {
    let Some(name) = job.get("model").and_then(Value::as_str) else { return Ok(()) };
    if !MODELS.contains(&name) {
        let must = format!("{}, or a model with layers", MODELS.join(", "));
        return Err(Error::field("job.model", name, must));
    }
    let reduction = &job["reduction"];
    let algorithm = reduction["algorithm"].as_str().unwrap_or("ring");
    let ranks = reduction["ranks"].as_u64().and_then(|ranks| u32::try_from(ranks).ok());
    if ranks.is_none() && name == "million-class" {
        let must = "given: the features that all ranks exchange depend on it";
        return Err(Error::field("job.reduction.ranks", "missing", must));
    }
    let model = DATA.model(name, ranks.unwrap_or(1), algorithm);
    job["model"] = serde_json::to_value(model)?;
    Ok(())
}
