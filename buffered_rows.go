package pgoutbox

import (
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// bufferedRows are rows that were read to the end, so that their connection is free.
type bufferedRows struct {
	fields []pgconn.FieldDescription
	types  *pgtype.Map
	tag    pgconn.CommandTag
	rows   [][][]byte
	next   int
	err    error
}

var _ pgx.Rows = (*bufferedRows)(nil)

func bufferRows(rows pgx.Rows) (*bufferedRows, error) {
	defer rows.Close()
	out := &bufferedRows{fields: slices.Clone(rows.FieldDescriptions()), types: pgtype.NewMap()} // the connection's map is its own goroutine's
	for rows.Next() {
		values := slices.Clone(rows.RawValues())
		for i := range values {
			values[i] = slices.Clone(values[i])
		}
		out.rows = append(out.rows, values)
	}
	out.tag = rows.CommandTag()
	return out, rows.Err()
}

func (r *bufferedRows) Close()                                       { r.next = len(r.rows) + 1 }
func (r *bufferedRows) Err() error                                   { return r.err }
func (r *bufferedRows) CommandTag() pgconn.CommandTag                { return r.tag }
func (r *bufferedRows) FieldDescriptions() []pgconn.FieldDescription { return r.fields }
func (r *bufferedRows) RawValues() [][]byte                          { return r.rows[r.next-1] }
func (r *bufferedRows) Conn() *pgx.Conn                              { return nil }
func (r *bufferedRows) TypeMap() *pgtype.Map                         { return r.types }
func (r *bufferedRows) Next() bool {
	if r.next >= len(r.rows) {
		r.Close()
		return false
	}
	r.next++
	return true
}

func (r *bufferedRows) Scan(dest ...any) error {
	err := pgx.ScanRow(r.types, r.fields, r.RawValues(), dest...)
	if err != nil {
		r.err = err
		r.Close()
	}
	return err
}

func (r *bufferedRows) Values() ([]any, error) {
	out := make([]any, len(r.fields))
	for i, raw := range r.RawValues() {
		if raw == nil {
			continue
		}
		field := r.fields[i]
		if known, ok := r.types.TypeForOID(field.DataTypeOID); ok {
			value, err := known.Codec.DecodeValue(r.types, field.DataTypeOID, field.Format, raw)
			if err != nil {
				return nil, err
			}
			out[i] = value
			continue
		}
		out[i] = string(raw)
	}
	return out, nil
}
