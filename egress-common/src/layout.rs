//! Layout rules for types shared with the kernel, checked at compile time.

/// Declares a map type: `repr(C)`, no padding, integers only, its size asserted for both address families where it is
/// generic. Under the feature `user` it implements aya's `Pod`.
macro_rules! map_type {
    ($(#[$m:meta])* pub struct $n:ident<A> { $($(#[$fm:meta])* pub $f:ident: $t:ty,)* } sizes $s4:literal, $s6:literal) => {
        $(#[$m])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $n<A> { $($(#[$fm])* pub $f: $t,)* }
        const _: () = {
            type A4 = $n<crate::V4>;
            type A6 = $n<crate::V6>;
            assert!(size_of::<A4>() == $s4 && size_of::<A6>() == $s6, "unexpected size");
        };
        map_type!(@sum $n, crate::V4, $s4, A, $($t),*);
        map_type!(@sum $n, crate::V6, $s6, A, $($t),*);
        #[cfg(feature = "user")]
        // SAFETY: repr(C), integers only, and the sizes of the fields add up to the size of the struct.
        unsafe impl aya::Pod for $n<crate::V4> {}
        #[cfg(feature = "user")]
        // SAFETY: as above.
        unsafe impl aya::Pod for $n<crate::V6> {}
    };
    ($(#[$m:meta])* pub struct $n:ident { $($(#[$fm:meta])* pub $f:ident: $t:ty,)* } size $s:literal) => {
        $(#[$m])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $n { $($(#[$fm])* pub $f: $t,)* }
        const _: () = {
            assert!(size_of::<$n>() == $s, "unexpected size");
            assert!(0 $(+ size_of::<$t>())* == $s, "padding");
        };
        #[cfg(feature = "user")]
        // SAFETY: repr(C), integers only, and the sizes of the fields add up to the size of the struct.
        unsafe impl aya::Pod for $n {}
    };
    (@sum $n:ident, $a:ty, $s:literal, $p:ident, $($t:ty),*) => {
        const _: () = {
            #[allow(dead_code, reason = "the generic parameter is named even where no field uses it")]
            type $p = $a;
            assert!(0 $(+ size_of::<$t>())* == $s, "padding");
        };
    };
}
pub(crate) use map_type;
