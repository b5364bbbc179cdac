use crate::{
    Batch, Heap, Tick,
    goods::{Bread, Brick, Wheat},
};

pub struct Field(());

impl Field {
    pub(crate) fn new() -> Self {
        Field(())
    }

    /// Takes two ticks for each.
    pub fn reap<const N: u32>(&mut self, tick: &mut Tick) -> Batch<Wheat, N> {
        tick.advance_by(2 * u64::from(N));
        Batch::conjured()
    }
}

/// Turns two wheat into a loaf, one loaf after another.
pub struct Oven {
    wheat: Heap<Wheat>,
    bread: Heap<Bread>,
    since: u64,
}

impl Oven {
    const BAKING_TICKS: u64 = match u64::from_str_radix(env!("BAKING_TICKS"), 10) {
        Ok(ticks) => ticks,
        Err(_) => panic!("a number"),
    };

    /// Costs four bricks.
    pub fn build(tick: &Tick, _bricks: Batch<Brick, 4>) -> Self {
        Oven { wheat: Heap::empty(), bread: Heap::empty(), since: tick.cur() }
    }

    pub fn wheat(&mut self, tick: &Tick) -> &mut Heap<Wheat> {
        self.bake(tick);
        &mut self.wheat
    }

    pub fn bread(&mut self, tick: &Tick) -> &mut Heap<Bread> {
        self.bake(tick);
        &mut self.bread
    }

    fn bake(&mut self, tick: &Tick) {
        while tick.cur() >= self.since + Self::BAKING_TICKS {
            match self.wheat.take::<2>() {
                Some(_) => {
                    self.bread.add(Batch::<Bread, 1>::conjured());
                    self.since += Self::BAKING_TICKS;
                }
                None => self.since = tick.cur(),
            }
        }
    }
}
