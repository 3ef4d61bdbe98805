/*
 * lattice_columns_decode, lattice_decode and lattice_rebuild_values from any bytes. They stay within their
 * buffers. Blocks that they accept survive being coded again, and all backends compute the same bits. The
 * first bytes select dtype, parent and number of elements, and the size of a side record. If the block shares
 * its rows, too, the record's first byte is the size of its columns.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/support/fuzz.h"
#include "tests/support/lattices.h"

#define HEADER    5
#define MOST_EACH 2048

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static bool expected(ckd_status status) {
    return status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED;
}

static uint8_t *exactly(const void *from, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    require(copy != NULL);
    memcpy(copy, from, size);
    return copy;
}

/* Special values, and values of all magnitudes. */
static uint8_t *parent_values(size_t size, uint32_t seed) {
    static const uint32_t odd[] = {0,          0x80000000, 1,          0x807fffff, 0x7f800000, 0xff800000,
                                   0x7fc00001, 0x7f800001, 0x7f7fffff, 0x00800000, 0x3f800000, 0xcb000001};
    uint8_t *out = malloc(size + 8);
    require(out != NULL);
    for (size_t i = 0; i < size; i += 4) {
        seed = seed * 1664525u + 1013904223u;
        uint32_t bits = seed >> 28 ? seed : odd[seed >> 8 & 7 ? (seed >> 16) % 12 : 3];
        memcpy(out + i, &bits, 4);
    }
    return out;
}

static bool columns(lattice_columns *out, const uint8_t *from, size_t size, lattice_scratch *scratch,
                    symbols_workspace *work) {
    uint8_t *stream = exactly(from, size);
    ckd_status status = lattice_columns_decode(out, stream, size, scratch, work, NULL);
    free(stream);
    require(expected(status));
    if (status != CKD_OK) {
        return false;
    }
    bytes again = {0};
    lattice_scratch room = {0};
    lattice_columns back;
    require(lattice_columns_encode(&again, out, &room, work, NULL) == CKD_OK);
    require(lattice_columns_decode(&back, again.data, again.size, &room, work, NULL) == CKD_OK);
    require(lattices_same_columns(out, &back));
    lattice_scratch_free(&room);
    bytes_free(&again);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16, CKD_F16, CKD_F32};
    if (size < HEADER) {
        return 0;
    }
    ckd_dtype dtype = dtypes[data[0] & 3];
    size_t n = 1 + (data[1] | (size_t)data[2] << 8) % MOST_EACH;
    size_t side = data[3] | (size_t)data[4] << 8, left = size - HEADER;
    side = side < left ? side : left;
    lattice_scratch column_room = {0}, row_room = {0}, room = {0};
    lattice_columns shared, shared_rows;
    symbols_workspace *work;
    require(symbols_workspace_create(&work, NULL) == CKD_OK);
    const uint8_t *sides = data + HEADER;
    size_t first = side;
    bool two = data[0] & 16 && side > 0 && side > sides[0];
    if (two) {
        first = *sides++;
    }
    bool has_shared = data[0] & 8 && columns(&shared, sides, first, &column_room, work);
    bool has_rows = two && columns(&shared_rows, sides + first, side - 1 - first, &row_room, work);
    uint8_t *payload = exactly(data + HEADER + side, left - side);
    lattice_block block;
    const lattice_columns *given = has_shared ? &shared : NULL;
    ckd_status status = lattice_decode(
        &block, &(lattice_payload){payload, left - side, n, given, has_rows ? &shared_rows : NULL, false},
        &room, work, NULL);
    require(expected(status));
    if (status == CKD_OK) {
        uint8_t *parent = parent_values(n * ckd_dtype_size(dtype), data[0]);
        lattices_check(&block, given, dtype, data[0] & 4 ? parent : NULL);
        free(parent);
    }
    symbols_workspace_free(work);
    lattice_scratch_free(&column_room);
    lattice_scratch_free(&row_room);
    lattice_scratch_free(&room);
    free(payload);
    return 0;
}
