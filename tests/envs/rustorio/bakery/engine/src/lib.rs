//! Time, goods and the oven's clockwork. Who can name this crate can also make goods from nothing.
#![feature(generic_const_exprs)]
#![allow(incomplete_features)]
use std::marker::PhantomData;

pub trait Good {
    const NAME: &str;
}

/// The time. There is one, and it only goes forward.
pub struct Tick(u64);

impl Tick {
    pub fn cur(&self) -> u64 {
        self.0
    }

    pub fn advance_by(&mut self, ticks: u64) {
        self.0 = self.0.checked_add(ticks).expect("the end of time");
    }
}

/// Exactly `N` of a good.
#[must_use]
pub struct Batch<G: Good, const N: u32>(PhantomData<G>);

impl<G: Good, const N: u32> Batch<G, N> {
    /// From nothing.
    pub fn conjured() -> Self {
        Batch(PhantomData)
    }

    pub fn join<const M: u32>(self, _other: Batch<G, M>) -> Batch<G, { N + M }> {
        Batch(PhantomData)
    }
}

/// Any number of a good.
pub struct Heap<G: Good>(u32, PhantomData<G>);

impl<G: Good> Heap<G> {
    pub fn empty() -> Self {
        Heap(0, PhantomData)
    }

    pub fn count(&self) -> u32 {
        self.0
    }

    pub fn add<const N: u32>(&mut self, _batch: Batch<G, N>) {
        self.0 += N;
    }

    pub fn take<const N: u32>(&mut self) -> Option<Batch<G, N>> {
        self.0 = self.0.checked_sub(N)?;
        Some(Batch(PhantomData))
    }
}

pub trait GameMode {
    type StartingResources: Default;
    type VictoryResources;
}

pub fn play<G: GameMode>(
    player: fn(Tick, G::StartingResources) -> (Tick, G::VictoryResources),
) -> ! {
    let (tick, _) = player(Tick(0), Default::default());
    println!("You won in {} ticks!", tick.cur());
    std::process::exit(0)
}
