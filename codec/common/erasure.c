/*
 * Reed-Solomon coding for parity of chunk files and of agents' memory. Plain XOR needs no library; other rows use
 * ISA-L.
 */
#include "codec/common/common.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* ---- GF(2^8), for small matrices; ISA-L handles the bytes of files ---- */

static uint8_t product(uint8_t a, uint8_t b) {
    unsigned sum = 0, x = a;
    for (; b; b = (uint8_t)(b >> 1)) {
        sum ^= b & 1 ? x : 0;
        x = x << 1 ^ (x & 0x80 ? 0x11du : 0);
    }
    return (uint8_t)sum;
}

/* a^254 is the inverse: the group has 255 elements. */
static uint8_t inverse(uint8_t a) {
    uint8_t power = a;
    for (int i = 0; i < 6; i++) {
        power = product(product(power, power), a);
    }
    return product(power, power);
}

/* A Cauchy matrix whose columns are scaled so that row 0 is all ones. */
uint8_t erasure_coefficient(unsigned row, unsigned column) {
    uint8_t x = (uint8_t)(ERASURE_PARITY_MAX + column);
    return product(inverse((uint8_t)(row ^ x)), x);
}

/* ---- ISA-L ---- */

typedef void (*tables_function)(int columns, int rows, unsigned char *matrix, unsigned char *tables);
typedef void (*sums_function)(int size, int columns, int rows, unsigned char *tables, unsigned char **in,
                              unsigned char **out);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static tables_function make_tables;
static sums_function make_sums;

static void find_isal(void) {
    const char *path = secure_getenv("CKD_ISAL");
    void *library = dlopen(path && path[0] ? path : "libisal.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        return;
    }
    /* The POSIX way to convert an object pointer to a function pointer. */
    *(void **)&make_tables = dlsym(library, "ec_init_tables");
    *(void **)&make_sums = make_tables ? dlsym(library, "ec_encode_data") : NULL;
}

ckd_status erasure_ready(ckd_error *err) {
    (void)pthread_once(&once, find_isal);
    return make_sums
               ? CKD_OK
               : err_set(err, CKD_E_UNSUPPORTED,
                         "more than one file of parity needs ISA-L, but libisal.so.2 is missing: install it "
                         "(Debian: libisal2), or give its path in CKD_ISAL");
}

/* ---- sums ---- */

static void add_to(uint8_t *to, const uint8_t *piece, size_t size) {
    size_t i = 0;
    for (; i + sizeof(uint64_t) <= size; i += sizeof(uint64_t)) {
        uint64_t a, b;
        memcpy(&a, to + i, sizeof(a));
        memcpy(&b, piece + i, sizeof(b));
        a ^= b;
        memcpy(to + i, &a, sizeof(a));
    }
    for (; i < size; i++) {
        to[i] ^= piece[i];
    }
}

static bool is_plain(const uint8_t *matrix, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (matrix[i] > 1) {
            return false;
        }
    }
    return true;
}

static void plain_sum(uint8_t *out, const uint8_t *row, const uint8_t *const *in, size_t columns,
                      size_t size) {
    memset(out, 0, size);
    for (size_t c = 0; c < columns; c++) {
        if (row[c]) {
            add_to(out, in[c], size);
        }
    }
}

/* Computes the rows from `first` on. */
static ckd_status isal_sums(const erasure_product *p, size_t first, ckd_error *err) {
    size_t rows = p->rows - first, columns = p->columns;
    ckd_status status = erasure_ready(err);
    if (status != CKD_OK) {
        return status;
    }
    uint8_t *tables = malloc(32 * rows * columns);
    if (!tables) {
        return err_nomem(err, 32 * rows * columns, "tables of erasure coding");
    }
    make_tables((int)columns, (int)rows, (unsigned char *)p->matrix + first * columns, tables);
    make_sums((int)p->size, (int)columns, (int)rows, tables, (unsigned char **)p->in,
              (unsigned char **)p->out + first);
    free(tables);
    return CKD_OK;
}

ckd_status erasure_sums(const erasure_product *p, ckd_error *err) {
    for (size_t r = 0; r < p->rows && p->columns; r++) {
        const uint8_t *row = p->matrix + r * p->columns;
        if (!is_plain(row, p->columns)) {
            return isal_sums(p, r, err);
        }
        plain_sum(p->out[r], row, p->in, p->columns, p->size);
    }
    return CKD_OK;
}

/* ---- reconstruction ---- */

/*
 * Gauss-Jordan elimination. `a` is count x count and becomes the unit matrix; `to` becomes its inverse. No pivot is 0,
 * since every square submatrix is invertible.
 */
static void invert(uint8_t *to, uint8_t *a, size_t count) {
    memset(to, 0, count * count);
    for (size_t i = 0; i < count; i++) {
        to[i * count + i] = 1;
    }
    for (size_t i = 0; i < count; i++) {
        uint8_t scale = inverse(a[i * count + i]);
        for (size_t c = 0; c < count; c++) {
            a[i * count + c] = product(a[i * count + c], scale);
            to[i * count + c] = product(to[i * count + c], scale);
        }
        for (size_t r = 0; r < count; r++) {
            uint8_t factor = r == i ? 0 : a[r * count + i];
            for (size_t c = 0; c < count && factor; c++) {
                a[r * count + c] ^= product(factor, a[i * count + c]);
                to[r * count + c] ^= product(factor, to[i * count + c]);
            }
        }
    }
}

void erasure_matrix(uint8_t *matrix, const unsigned *lost, const unsigned *rows, size_t count,
                    const unsigned *intact, size_t intact_count) {
    uint8_t part[ERASURE_PARITY_MAX * ERASURE_PARITY_MAX], inverse[ERASURE_PARITY_MAX * ERASURE_PARITY_MAX];
    for (size_t r = 0; r < count; r++) {
        for (size_t c = 0; c < count; c++) {
            part[r * count + c] = erasure_coefficient(rows[r], lost[c]);
        }
    }
    invert(inverse, part, count);
    for (size_t l = 0; l < count; l++) {
        uint8_t *out = matrix + l * (count + intact_count);
        memcpy(out, inverse + l * count, count);
        for (size_t c = 0; c < intact_count; c++) {
            uint8_t sum = 0;
            for (size_t r = 0; r < count; r++) {
                sum ^= product(inverse[l * count + r], erasure_coefficient(rows[r], intact[c]));
            }
            out[count + c] = sum;
        }
    }
}
