//! `#[derive(Good)]`, so that the game is built with a procedural macro, as Rustorio is.
use proc_macro::{TokenStream, TokenTree};

#[proc_macro_derive(Good)]
pub fn good(item: TokenStream) -> TokenStream {
    let mut words = item.into_iter().skip_while(|t| t.to_string() != "struct").skip(1);
    let Some(TokenTree::Ident(name)) = words.next() else { panic!("a struct with a name") };
    format!("impl ::bakery_engine::Good for {name} {{ const NAME: &str = \"{name}\"; }}")
        .parse()
        .unwrap()
}
