use crate::{
    Batch, GameMode,
    buildings::Field,
    goods::{Bread, Brick},
};

/// Bake three loaves.
pub struct FirstDay;

pub struct Start {
    pub bricks: Batch<Brick, 4>,
    pub field: Field,
}

impl Default for Start {
    fn default() -> Self {
        Start { bricks: Batch::conjured(), field: Field::new() }
    }
}

impl GameMode for FirstDay {
    type StartingResources = Start;
    type VictoryResources = Batch<Bread, 3>;
}
