//! A bakery: reap wheat, grind it to flour, bake bread in an oven that costs bricks.
pub mod buildings;
pub mod gamemodes;
pub mod goods;

pub use bakery_engine::{Batch, GameMode, Heap, Tick, play};
