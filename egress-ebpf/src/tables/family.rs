//! The tables of each address family.

use crate::{headers::outer::Outer, tables::maps::*};
use egress_common::{V4, V6};

/// Defines the accessors of a family's maps: function, kind and map.
macro_rules! tables {
    ($($name:ident: $kind:ident = $map:ident;)*) => {
        $(
            #[inline(always)]
            fn $name() -> &'static $kind<Self> {
                &$map
            }
        )*
    };
}

/// An address family: its headers and its tables. Implemented by its address type.
pub trait Family: Outer {
    fn flows() -> &'static Flows<Self>;
    fn reverses() -> &'static Reverses<Self>;
    fn inbound() -> &'static Inbounds<Self>;
    fn masqueraded() -> &'static MasqueradedFlows<Self>;
    fn tickets() -> &'static Tickets<Self>;
    fn ended() -> &'static EndedFlows<Self>;
    fn fragments() -> &'static Fragments<Self>;
    fn held() -> &'static HeldFragments<Self>;
    fn holding() -> &'static Holdings<Self>;
    fn endpoints() -> &'static Endpoints<Self>;
    fn routes() -> &'static Routes<Self>;
    fn excepts() -> &'static Excepts<Self>;
    fn egress_index() -> &'static EgressIndex<Self>;
    fn search() -> &'static Searches<Self>;
    /// Returns the number of flows of each endpoint.
    fn shares() -> &'static Shares;
    fn hops() -> &'static Hops<Self>;
}

impl Family for V4 {
    tables! {
        flows: Flows = FLOWS_V4;
        reverses: Reverses = REVERSE_V4;
        inbound: Inbounds = INBOUND_V4;
        masqueraded: MasqueradedFlows = MASQUERADED_V4;
        tickets: Tickets = TICKETS_V4;
        ended: EndedFlows = ENDED_V4;
        fragments: Fragments = FRAGMENTS_V4;
        held: HeldFragments = HELD_V4;
        holding: Holdings = HOLDING_V4;
        endpoints: Endpoints = ENDPOINTS_V4;
        routes: Routes = ROUTES_V4;
        excepts: Excepts = EXCEPTS_V4;
        egress_index: EgressIndex = EGRESS_INDEX_V4;
        search: Searches = SEARCH_V4;
        hops: Hops = HOPS_V4;
    }

    #[inline(always)]
    fn shares() -> &'static Shares {
        &SHARES_V4
    }
}

impl Family for V6 {
    tables! {
        flows: Flows = FLOWS_V6;
        reverses: Reverses = REVERSE_V6;
        inbound: Inbounds = INBOUND_V6;
        masqueraded: MasqueradedFlows = MASQUERADED_V6;
        tickets: Tickets = TICKETS_V6;
        ended: EndedFlows = ENDED_V6;
        fragments: Fragments = FRAGMENTS_V6;
        held: HeldFragments = HELD_V6;
        holding: Holdings = HOLDING_V6;
        endpoints: Endpoints = ENDPOINTS_V6;
        routes: Routes = ROUTES_V6;
        excepts: Excepts = EXCEPTS_V6;
        egress_index: EgressIndex = EGRESS_INDEX_V6;
        search: Searches = SEARCH_V6;
        hops: Hops = HOPS_V6;
    }

    #[inline(always)]
    fn shares() -> &'static Shares {
        &SHARES_V6
    }
}
