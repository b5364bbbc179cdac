//! Plays the player's program, and reports how it went.
use std::{io::stdin, sync::OnceLock};

/// Marks our lines among all that is printed. The player's program has no way to read it.
static SECRET: OnceLock<String> = OnceLock::new();

fn main() {
    let mut secret = String::new();
    stdin().read_line(&mut secret).expect("standard input");
    let secret = secret.trim().to_string();
    println!("\n{secret} begun");
    stages::begin(secret.clone());
    SECRET.set(secret).expect("set once");
    GAME::play::<MODE>(|tick, start| {
        let (tick, victory) = player::user_main(tick, start);
        println!("\n{} won {}", SECRET.get().expect("set above"), tick.cur());
        (tick, victory)
    });
}
