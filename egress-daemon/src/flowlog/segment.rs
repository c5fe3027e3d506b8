//! A finished part of a log as a Parquet file, readable by any engine: one row for each record. Converts between records and bytes.

use super::journal::Row;
use egress_core::leaselog::LeaseRecord;
use parquet::{
    basic::{Compression, ZstdLevel},
    column::reader::get_typed_column_reader,
    data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type},
    errors::{ParquetError, Result},
    file::{
        metadata::ParquetMetaData,
        properties::WriterProperties,
        reader::{ChunkReader, FileReader, RowGroupReader, SerializedFileReader},
        writer::{SerializedFileWriter, SerializedRowGroupWriter},
    },
    schema::{parser::parse_message_type, types::SchemaDescriptor},
};
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

const SCHEMA: &str = "
message leases {
  REQUIRED INT64 time (TIMESTAMP(MICROS, true));
  REQUIRED BYTE_ARRAY event (UTF8);
  OPTIONAL BYTE_ARRAY egress_ip (UTF8);
  OPTIONAL INT32 first_port;
  OPTIONAL INT32 last_port;
  OPTIONAL BYTE_ARRAY node (UTF8);
  OPTIONAL INT64 lost;
}";

/// Writes a segment.
pub(super) fn write(records: &[LeaseRecord], out: impl Write + Send) -> Result<()> {
    let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
    let mut file = SerializedFileWriter::new(out, Arc::new(parse_message_type(SCHEMA)?), Arc::new(properties))?;
    let rows: Vec<Row> = records.iter().map(Row::of).collect();
    let text = |value: &Option<String>| value.as_deref().map(ByteArray::from);
    let mut group = file.next_row_group()?;
    required::<Int64Type>(&mut group, rows.iter().map(|row| row.at))?;
    required::<ByteArrayType>(&mut group, rows.iter().map(|row| ByteArray::from(row.event.as_str())))?;
    optional::<ByteArrayType>(&mut group, rows.iter().map(|row| text(&row.egress_ip)))?;
    optional::<Int32Type>(&mut group, rows.iter().map(|row| row.first_port))?;
    optional::<Int32Type>(&mut group, rows.iter().map(|row| row.last_port))?;
    optional::<ByteArrayType>(&mut group, rows.iter().map(|row| text(&row.node)))?;
    optional::<Int64Type>(&mut group, rows.iter().map(|row| row.lost))?;
    group.close()?;
    file.close().map(drop)
}

pub(super) fn required<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, impl Write + Send>,
    values: impl Iterator<Item = T::T>,
) -> Result<()> {
    let Some(mut column) = group.next_column()? else { return Ok(()) };
    column.typed::<T>().write_batch(&values.collect::<Vec<_>>(), None, None)?;
    column.close()
}

pub(super) fn optional<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, impl Write + Send>,
    values: impl Iterator<Item = Option<T::T>>,
) -> Result<()> {
    let Some(mut column) = group.next_column()? else { return Ok(()) };
    let all: Vec<Option<T::T>> = values.collect();
    let levels: Vec<i16> = all.iter().map(|value| value.is_some().into()).collect();
    column.typed::<T>().write_batch(&all.into_iter().flatten().collect::<Vec<_>>(), Some(&levels), None)?;
    column.close()
}

/// Returns the name of a Parquet file's schema: `leases` or `flows` for a segment.
pub(super) fn schema_name(file: impl ChunkReader + 'static) -> Result<String> {
    Ok(SerializedFileReader::new(file)?.metadata().file_metadata().schema().name().to_owned())
}

/// Checks that a file has this schema, since reading columns of other types panics.
pub(super) fn check(metadata: &ParquetMetaData, schema: &str) -> Result<()> {
    let expected = SchemaDescriptor::new(Arc::new(parse_message_type(schema)?));
    let actual = metadata.file_metadata().schema_descr();
    let columns = |schema: &SchemaDescriptor| -> Vec<_> {
        schema.columns().iter().map(|column| (column.name().to_owned(), column.physical_type())).collect()
    };
    if (actual.name(), columns(actual)) == (expected.name(), columns(&expected)) {
        return Ok(());
    }
    Err(ParquetError::General(format!("it has other columns than a log of {}", expected.name())))
}

/// Reads a segment.
pub(super) fn read(file: impl ChunkReader + 'static) -> Result<Vec<LeaseRecord>> {
    let file = SerializedFileReader::new(file)?;
    check(file.metadata(), SCHEMA)?;
    let mut records = Vec::new();
    for number in 0..file.num_row_groups() {
        let group = file.get_row_group(number)?;
        let group = group.as_ref();
        let text = |value: Option<ByteArray>| Some(String::from_utf8_lossy(value?.data()).into_owned());
        let (at, event) = (column::<Int64Type>(group, 0)?, column::<ByteArrayType>(group, 1)?);
        let (egress_ip, node) = (column::<ByteArrayType>(group, 2)?, column::<ByteArrayType>(group, 5)?);
        let (first, last) = (column::<Int32Type>(group, 3)?, column::<Int32Type>(group, 4)?);
        let lost = column::<Int64Type>(group, 6)?;
        let rows =
            at.into_iter().zip(event).zip(egress_ip.into_iter().zip(node)).zip(first.into_iter().zip(last)).zip(lost);
        records.extend(rows.filter_map(|((((at, event), (egress_ip, node)), (first_port, last_port)), lost)| {
            let row = Row {
                at: at?,
                event: text(event)?,
                egress_ip: text(egress_ip),
                first_port,
                last_port,
                node: text(node),
                lost,
            };
            row.record()
        }));
    }
    Ok(records)
}

/// Reads a column; `None` where the file has no value.
fn column<T: DataType>(group: &dyn RowGroupReader, number: usize) -> Result<Vec<Option<T::T>>> {
    part::<T>(group, number, 0..usize::try_from(group.metadata().num_rows()).unwrap_or(0))
}

/// Reads a range of rows of a column. If the file has a page index, the pages before the range are not read.
pub(super) fn part<T: DataType>(
    group: &dyn RowGroupReader,
    number: usize,
    range: Range<usize>,
) -> Result<Vec<Option<T::T>>> {
    let rows = range.len();
    let optional = group.metadata().column(number).column_descr().max_def_level() > 0;
    let mut reader = get_typed_column_reader::<T>(group.get_column_reader(number)?);
    reader.skip_records(range.start)?;
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let mut read = 0;
    while read < rows {
        let (more, _, _) = reader.read_records(rows - read, Some(&mut levels), None, &mut values)?;
        if more == 0 {
            break;
        }
        read += more;
    }
    let mut values = values.into_iter();
    if !optional {
        return Ok(values.map(Some).collect());
    }
    Ok(levels.into_iter().map(|level| if level > 0 { values.next() } else { None }).collect())
}
