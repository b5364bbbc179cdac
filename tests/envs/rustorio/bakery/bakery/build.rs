//! The author's own, which cargo runs outside of the sandbox: it sets how long bread bakes.
fn main() {
    println!("cargo::rustc-env=BAKING_TICKS=5");
}
