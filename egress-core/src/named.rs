//! Enums whose variants are written as their names.

/// Defines such an enum, with a list of all its variants and their text.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident,)* } $(#[$text:meta])* as_str) => {
        $(#[$meta])*
        pub enum $name { $( $(#[$doc])* $variant, )* }

        impl $name {
            /// All variants.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            $(#[$text])*
            pub fn as_str(self) -> &'static str { match self { $(Self::$variant => stringify!($variant)),* } }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.as_str()) }
        }
    };
}
