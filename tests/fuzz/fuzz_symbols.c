/*
 * symbols_decode and coder_decode from any bytes. They must stay within their buffers, which have the exact
 * size. Integers that symbols_decode accepts must survive being coded again, also with rows and columns. The
 * first four bytes select coding or columns, width and count.
 */
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/entropy.h"
#include "tests/support/fuzz.h"

#define HEADER    4
#define MOST_EACH 8192

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static uint8_t *exactly(const uint8_t *from, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    require(copy != NULL);
    memcpy(copy, from, size);
    return copy;
}

static void code_again(coder *c, const uint8_t *values, unsigned width, size_t n, const uint8_t *context,
                       const symbols_grid *grid, symbols_mode mode) {
    symbols_workspace *w = coder_symbols(c);
    symbols_plan(w, 0, mode, &(symbols_input){width, n, values, context}, grid);
    size_t bound = symbols_bound(w, 0);
    uint8_t *stream = malloc(bound ? bound : 1), *back = malloc(n * width + 1);
    require(stream && back);
    size_t size = symbols_encode(w, 0, values, context, stream, bound);
    require(size <= bound && (size > 0) == (n > 0));
    require(symbols_decode(w, &(symbols_output){width, n, back, context}, stream, size, NULL) == CKD_OK);
    require(n == 0 || memcmp(back, values, n * width) == 0);
    free(back);
    free(stream);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < HEADER) {
        return 0;
    }
    coder *c = NULL;
    require(coder_create(&c, NULL) == CKD_OK);
    coding how = (coding)(data[0] % (CODING_LATTICE + 1));
    how = data[0] & 128 ? CODING_SYMBOLS : how; /* in half of the inputs */
    unsigned width = 1u << (data[1] & 3);
    size_t n = (data[2] | (size_t)data[3] << 8) % MOST_EACH;
    uint8_t *context = malloc(n + 1), *values = malloc(n * width + 1);
    require(context && values);
    for (size_t i = 0; i < n; i++) {
        context[i] = (uint8_t)(i * (data[1] >> 3));
    }
    uint8_t *stream = exactly(data + HEADER, size - HEADER), *exact = exactly(values, n * width);
    ckd_status status =
        coder_decode(c, how, &(coder_target){exact, n * width, width, data[1] & 4 ? context : NULL}, stream,
                     size - HEADER, NULL);
    require(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
    if (status == CKD_OK && how == CODING_SYMBOLS) {
        symbols_grid grid = {1u + (data[0] & 127), data[3] % (1u + (data[0] & 127))};
        code_again(c, exact, width, n, context, NULL, SYMBOLS_CLASS);
        code_again(c, exact, width, n, NULL, NULL, SYMBOLS_SPLIT);
        code_again(c, exact, width, n, NULL, &grid, SYMBOLS_SPLIT);
    }
    free(exact);
    free(stream);
    free(values);
    free(context);
    coder_free(c);
    return 0;
}
