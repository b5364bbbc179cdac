//! What a player's program finds under the names `std`, `core` and `alloc`: the parts of the real
//! ones that compute and print. Files, processes, the environment, input, threads and caught panics
//! are not here, nor are the macros that read files at compile time, so no program can name them.
#![no_std]

extern crate alloc as heap;
extern crate std as real;

pub use core::{
    any, array, cell, char, clone, cmp, convert, default, error, f32, f64, hash, hint, i8, i16, i32,
    i64, i128, isize, iter, marker, mem, num, ops, option, panic, pin, result, time, u8, u16, u32,
    u64, u128, usize,
};
pub use core::{
    assert, assert_eq, assert_ne, compile_error, concat, debug_assert, debug_assert_eq,
    debug_assert_ne, format_args, line, matches, stringify, todo, unimplemented, unreachable, write,
    writeln,
};
pub use heap::{borrow, boxed, fmt, format, rc, slice, str, string, vec};
pub use real::{collections, dbg, eprint, eprintln, print, println};

pub mod prelude {
    pub mod rust_2024 {
        pub use crate::{
            assert, assert_eq, assert_ne, compile_error, concat, dbg, debug_assert, debug_assert_eq,
            debug_assert_ne, eprint, eprintln, format, format_args, line, matches, panic, print,
            println, stringify, todo, unimplemented, unreachable, vec, write, writeln,
        };
        pub use crate::{
            borrow::ToOwned,
            boxed::Box,
            string::{String, ToString},
            vec::Vec,
        };
        pub use core::prelude::rust_2024::{
            AsMut, AsRef, Clone, Copy, Debug, Default, DoubleEndedIterator, Drop, Eq, Err,
            ExactSizeIterator, Extend, Fn, FnMut, FnOnce, From, FromIterator, Hash, Into,
            IntoIterator, Iterator, None, Ok, Option, Ord, PartialEq, PartialOrd, Result, Send,
            Sized, Some, Sync, TryFrom, TryInto, Unpin, derive, drop,
        };
    }
}
