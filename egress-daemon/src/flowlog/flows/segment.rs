//! A finished part of a flow log as a Parquet file: one row for each flow, and rows that describe the file. Converts from and to bytes.
//!
//! Rows that describe the file are the first row group. Flows are sorted by egress IP and port, so that the page index finds the pages
//! with a port, and addresses and ports need hardly any bytes.

use super::merge::{Journal, Row};
use super::{Entry, Recorded, Span, Wanted};
use crate::flowlog::pod_parts;
use crate::flowlog::segment::{check, optional, part, required};
use parquet::{
    basic::{Compression, Encoding, ZstdLevel},
    data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type},
    errors::Result,
    file::{
        page_index::column_index::ColumnIndexMetaData,
        properties::WriterProperties,
        reader::{ChunkReader, FileReader, RowGroupReader, SerializedFileReader},
        serialized_reader::ReadOptionsBuilder,
        statistics::Statistics,
        writer::{SerializedFileWriter, SerializedRowGroupWriter},
    },
    schema::{parser::parse_message_type, types::ColumnPath},
};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;

pub(super) const SCHEMA: &str = "
message flows {
  REQUIRED BYTE_ARRAY event (UTF8);
  REQUIRED INT64 began (TIMESTAMP(MICROS, true));
  OPTIONAL INT64 ended (TIMESTAMP(MICROS, true));
  OPTIONAL BYTE_ARRAY egress_ip (UTF8);
  OPTIONAL INT32 egress_port;
  OPTIONAL INT32 protocol;
  OPTIONAL BYTE_ARRAY namespace (UTF8);
  OPTIONAL BYTE_ARRAY pod (UTF8);
  REQUIRED BYTE_ARRAY node (UTF8);
  OPTIONAL BYTE_ARRAY policy (UTF8);
  OPTIONAL BYTE_ARRAY destination (UTF8);
  OPTIONAL INT32 destination_port;
  OPTIONAL INT64 lost;
  OPTIONAL INT32 ticket;
}";

/// The indices of columns.
mod at {
    pub(super) const EVENT: usize = 0;
    pub(super) const BEGAN: usize = 1;
    pub(super) const ENDED: usize = 2;
    pub(super) const EGRESS_IP: usize = 3;
    pub(super) const EGRESS_PORT: usize = 4;
    pub(super) const PROTOCOL: usize = 5;
    pub(super) const NAMESPACE: usize = 6;
    pub(super) const POD: usize = 7;
    pub(super) const NODE: usize = 8;
    pub(super) const POLICY: usize = 9;
    pub(super) const DESTINATION: usize = 10;
    pub(super) const DESTINATION_PORT: usize = 11;
    pub(super) const LOST: usize = 12;
    pub(super) const TICKET: usize = 13;
}

/// The values of `event`.
mod event {
    pub(super) const FLOW: &str = "flow";
    pub(super) const REFUSED: &str = "refused";
    pub(super) const STARTED: &str = "started";
    pub(super) const CONTINUED: &str = "continued";
    pub(super) const OLDEST: &str = "oldest";
    pub(super) const LOST: &str = "lost";
}

/// The number of rows in a page, the smallest unit that is read to find a flow.
const PAGE_ROWS: usize = 4_096;
/// The level of zstd: a tenth smaller than level 1, for a few milliseconds more per 100,000 flows.
const LEVEL: i32 = 3;

/// Writes a segment.
pub(super) fn write(journal: &mut Journal, out: impl Write + Send) -> Result<()> {
    let port = ColumnPath::from("egress_port");
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(LEVEL)?))
        .set_data_page_row_count_limit(PAGE_ROWS)
        .set_write_batch_size(PAGE_ROWS)
        .set_column_dictionary_enabled(port.clone(), false)
        .set_column_encoding(port, Encoding::DELTA_BINARY_PACKED);
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    let mut file = SerializedFileWriter::new(out, schema, Arc::new(properties.build()))?;
    write_group(file.next_row_group()?, journal, &about_file(&journal.span))?;
    journal.rows.sort_by_key(|Row { entry, .. }| (entry.egress_ip, entry.port, entry.began, entry.ticket));
    if !journal.rows.is_empty() {
        let rows: Vec<Cells<'_>> = journal.rows.iter().map(Cells::of).collect();
        write_group(file.next_row_group()?, journal, &rows)?;
    }
    file.close().map(drop)
}

/// A row.
struct Cells<'a> {
    event: &'static str,
    began: i64,
    ended: Option<i64>,
    lost: Option<i64>,
    flow: Option<&'a Entry>,
    ticket: Option<u32>,
}

impl<'a> Cells<'a> {
    fn of(row: &'a Row) -> Self {
        let event = if row.refused { event::REFUSED } else { event::FLOW };
        let (flow, ticket) = (Some(&row.entry), row.ticket());
        Self { event, began: row.entry.began, ended: row.ended, lost: None, flow, ticket }
    }
}

fn about_file(span: &Span) -> Vec<Cells<'static>> {
    let first = if span.started { event::STARTED } else { event::CONTINUED };
    let cells = |event, began, ended, lost| Cells { event, began, ended: Some(ended), lost, flow: None, ticket: None };
    let lost =
        span.lost.iter().map(|(from, until, count)| cells(event::LOST, *from, *until, i64::try_from(*count).ok()));
    let oldest = span.oldest.map(|began| cells(event::OLDEST, began, began, None));
    std::iter::once(cells(first, span.from, span.until, None)).chain(oldest).chain(lost).collect()
}

fn write_group<W: Write + Send>(
    mut group: SerializedRowGroupWriter<'_, W>,
    journal: &Journal,
    rows: &[Cells<'_>],
) -> Result<()> {
    let pods: BTreeMap<u32, (Option<ByteArray>, ByteArray)> =
        journal.names.iter().map(|(n, name)| (*n, parts(name))).collect();
    let policies: BTreeMap<u32, ByteArray> = journal.names.iter().map(|(n, name)| (*n, name.as_str().into())).collect();
    let (mut egress_ips, mut destinations) = (Texts::default(), Texts::default());
    let node = ByteArray::from(journal.node.as_str());
    let flows = || rows.iter().map(|row| row.flow);
    let pod = |flow: Option<&Entry>| pods.get(&flow?.pod);
    required::<ByteArrayType>(&mut group, rows.iter().map(|row| row.event.into()))?;
    required::<Int64Type>(&mut group, rows.iter().map(|row| row.began))?;
    optional::<Int64Type>(&mut group, rows.iter().map(|row| row.ended))?;
    optional::<ByteArrayType>(&mut group, flows().map(|flow| Some(egress_ips.of(flow?.egress_ip))))?;
    optional::<Int32Type>(&mut group, flows().map(|flow| Some(flow?.port.into())))?;
    optional::<Int32Type>(&mut group, flows().map(|flow| Some(flow?.protocol.into())))?;
    optional::<ByteArrayType>(&mut group, flows().map(|flow| pod(flow)?.0.clone()))?;
    optional::<ByteArrayType>(&mut group, flows().map(|flow| Some(pod(flow)?.1.clone())))?;
    required::<ByteArrayType>(&mut group, rows.iter().map(|_| node.clone()))?;
    optional::<ByteArrayType>(&mut group, flows().map(|flow| policies.get(&flow?.policy).cloned()))?;
    optional::<ByteArrayType>(&mut group, flows().map(|flow| Some(destinations.of(flow?.destination?.ip()))))?;
    optional::<Int32Type>(&mut group, flows().map(|flow| Some(flow?.destination?.port().into())))?;
    optional::<Int64Type>(&mut group, rows.iter().map(|row| row.lost))?;
    optional::<Int32Type>(&mut group, rows.iter().map(|row| row.ticket.map(u32::cast_signed)))?;
    group.close().map(drop)
}

fn parts(pod: &str) -> (Option<ByteArray>, ByteArray) {
    let (namespace, name) = pod_parts(pod);
    (namespace.map(ByteArray::from), name.into())
}

/// Addresses as text. Each is formatted only once.
#[derive(Default)]
struct Texts(HashMap<IpAddr, ByteArray>);

impl Texts {
    fn of(&mut self, address: IpAddr) -> ByteArray {
        self.0.entry(address).or_insert_with(|| address.to_string().as_str().into()).clone()
    }
}

/// Returns a segment's span, and its flows with the wanted port.
pub(super) fn read(file: impl ChunkReader + 'static, wanted: &Wanted) -> Result<(Span, Vec<Recorded>)> {
    let file = SerializedFileReader::new_with_options(file, ReadOptionsBuilder::new().with_page_index().build())?;
    check(file.metadata(), SCHEMA)?;
    let (mut span, mut flows) = (Span::default(), Vec::new());
    for number in 0..file.num_row_groups() {
        let group = file.get_row_group(number)?;
        let group = group.as_ref();
        if has_flows(group) {
            if may_have(group, wanted) {
                let rows = pages(&file, number, wanted);
                flows.extend(matching(group, rows, wanted)?);
            }
        } else {
            read_span(group, &mut span)?;
        }
    }
    Ok((span, flows))
}

fn has_flows(group: &dyn RowGroupReader) -> bool {
    let statistics = group.metadata().column(at::EGRESS_PORT).statistics();
    statistics.is_some_and(|statistics| statistics.min_bytes_opt().is_some())
}

/// Returns whether some flow of a row group may have the port at the time.
fn may_have(group: &dyn RowGroupReader, wanted: &Wanted) -> bool {
    let statistics = |column: usize| group.metadata().column(column).statistics();
    let port = i32::from(wanted.port);
    let ports = match statistics(at::EGRESS_PORT) {
        Some(Statistics::Int32(ports)) => (ports.min_opt().copied(), ports.max_opt().copied()),
        _ => (None, None),
    };
    let began = match statistics(at::BEGAN) {
        Some(Statistics::Int64(began)) => began.min_opt().copied(),
        _ => None,
    };
    let ended = match statistics(at::ENDED) {
        // Flows that have not ended have no value.
        Some(Statistics::Int64(ended)) if ended.null_count_opt() == Some(0) => ended.max_opt().copied(),
        _ => None,
    };
    ports.0.is_none_or(|first| first <= port)
        && ports.1.is_none_or(|last| port <= last)
        && began.is_none_or(|first| first <= wanted.until)
        && ended.is_none_or(|last| wanted.from <= last)
}

/// Returns the rows of the pages that may have the port of the egress IP, according to the page index.
fn pages<R: ChunkReader + 'static>(file: &SerializedFileReader<R>, group: usize, wanted: &Wanted) -> Vec<Range<usize>> {
    let index = file.metadata().page_index_for_row_group(group);
    let rows = usize::try_from(file.metadata().row_group(group).num_rows()).unwrap_or(0);
    let ranges = |column: usize, fits: &dyn Fn(&ColumnIndexMetaData, usize) -> bool| -> Vec<Range<usize>> {
        let (Some(values), Some(pages)) = (index.column_index(column), index.page_locations(column)) else {
            return std::iter::once(0..rows).collect();
        };
        let first =
            |page: usize| pages.get(page).and_then(|page| usize::try_from(page.first_row_index).ok()).unwrap_or(rows);
        let mut all: Vec<Range<usize>> = Vec::new();
        for page in (0..pages.len()).filter(|page| fits(values, *page)) {
            match all.last_mut() {
                Some(last) if last.end == first(page) => last.end = first(page + 1),
                _ => all.push(first(page)..first(page + 1)),
            }
        }
        all
    };
    let address = wanted.egress_ip.to_string();
    let with_address = ranges(at::EGRESS_IP, &|values, page| match values {
        ColumnIndexMetaData::BYTE_ARRAY(values) => {
            values.min_value(page).is_none_or(|min| min <= address.as_bytes())
                && values.max_value(page).is_none_or(|max| address.as_bytes() <= max)
        }
        _ => true,
    });
    let port = i32::from(wanted.port);
    let with_port = ranges(at::EGRESS_PORT, &|values, page| match values {
        ColumnIndexMetaData::INT32(values) => {
            values.min_value(page).is_none_or(|min| *min <= port)
                && values.max_value(page).is_none_or(|max| port <= *max)
        }
        _ => true,
    });
    let both = with_address.iter().flat_map(|a| with_port.iter().map(|b| a.start.max(b.start)..a.end.min(b.end)));
    both.filter(|range| !range.is_empty()).collect()
}

/// Returns the flows with the port among these rows.
fn matching(group: &dyn RowGroupReader, ranges: Vec<Range<usize>>, wanted: &Wanted) -> Result<Vec<Recorded>> {
    let (address, port) = (ByteArray::from(wanted.egress_ip.to_string().as_str()), i32::from(wanted.port));
    let mut flows = Vec::new();
    for range in ranges {
        let ports = part::<Int32Type>(group, at::EGRESS_PORT, range.clone())?;
        let addresses = part::<ByteArrayType>(group, at::EGRESS_IP, range.clone())?;
        let fits =
            |row: usize| ports.get(row) == Some(&Some(port)) && addresses.get(row) == Some(&Some(address.clone()));
        // The rows are sorted, so all matches are adjacent.
        let Some(first) = (0..range.len()).find(|row| fits(*row)) else { continue };
        let count = (first..range.len()).take_while(|row| fits(*row)).count();
        flows.extend(recorded(group, range.start + first..range.start + first + count, wanted)?);
    }
    Ok(flows)
}

fn recorded(group: &dyn RowGroupReader, rows: Range<usize>, wanted: &Wanted) -> Result<Vec<Recorded>> {
    let text = |column: usize| -> Result<Vec<Option<String>>> {
        let values = part::<ByteArrayType>(group, column, rows.clone())?;
        Ok(values.into_iter().map(|value| Some(String::from_utf8_lossy(value?.data()).into_owned())).collect())
    };
    let (events, began) = (text(at::EVENT)?, part::<Int64Type>(group, at::BEGAN, rows.clone())?);
    let (ended, protocols) =
        (part::<Int64Type>(group, at::ENDED, rows.clone())?, part::<Int32Type>(group, at::PROTOCOL, rows.clone())?);
    let (namespaces, pods, nodes, policies) =
        (text(at::NAMESPACE)?, text(at::POD)?, text(at::NODE)?, text(at::POLICY)?);
    let (destinations, destination_ports) =
        (text(at::DESTINATION)?, part::<Int32Type>(group, at::DESTINATION_PORT, rows.clone())?);
    let tickets = part::<Int32Type>(group, at::TICKET, rows.clone())?;
    let flow = |row: usize| -> Option<Recorded> {
        let pod = pods.get(row)?.clone().unwrap_or_else(|| "?".into());
        let destination = destinations.get(row)?.as_ref().and_then(|address| address.parse().ok());
        let destination_port = destination_ports.get(row)?.and_then(|port| u16::try_from(port).ok());
        Some(Recorded {
            egress_ip: wanted.egress_ip,
            port: wanted.port,
            protocol: u8::try_from((*protocols.get(row)?)?).ok()?,
            pod: namespaces.get(row)?.as_ref().map_or_else(|| pod.clone(), |namespace| format!("{namespace}/{pod}")),
            node: nodes.get(row)?.clone()?,
            policy: policies.get(row)?.clone(),
            destination: destination.zip(destination_port).map(|(address, port)| SocketAddr::new(address, port)),
            began: (*began.get(row)?)?,
            ended: *ended.get(row)?,
            refused: events.get(row)?.as_deref() == Some(event::REFUSED),
            ticket: tickets.get(row)?.map(i32::cast_unsigned),
        })
    };
    Ok((0..rows.len()).filter_map(flow).collect())
}

fn read_span(group: &dyn RowGroupReader, span: &mut Span) -> Result<()> {
    let rows = 0..usize::try_from(group.metadata().num_rows()).unwrap_or(0);
    let events = part::<ByteArrayType>(group, at::EVENT, rows.clone())?;
    let (began, ended) =
        (part::<Int64Type>(group, at::BEGAN, rows.clone())?, part::<Int64Type>(group, at::ENDED, rows.clone())?);
    let lost = part::<Int64Type>(group, at::LOST, rows)?;
    for (((event, began), ended), lost) in events.into_iter().zip(began).zip(ended).zip(lost) {
        let (Some(event), Some(began), Some(ended)) = (event, began, ended) else { continue };
        match (event.as_utf8()?, lost) {
            (event::LOST, Some(lost)) => span.lost.push((began, ended, lost.unsigned_abs())),
            (event::OLDEST, _) => span.oldest = Some(began),
            (first, _) => (span.from, span.until, span.started) = (began, ended, first == event::STARTED),
        }
    }
    Ok(())
}
