/*
 * Price tables from any bytes. An accepted table has the texts and numbers that the header promises, and can
 * be printed.
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli/report/prices.h"
#include "tests/support/fuzz.h"
#include "tests/support/fuzz_file.h"

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static void check_price(double price) {
    require(isnan(price) || (price >= 0 && price <= 1e9));
}

static void check(const cli_prices *p) {
    require(p->name[0] && strlen(p->name) <= 100 && strlen(p->date) == 10 && p->currency[0] &&
            strlen(p->currency) <= 8);
    require(!isnan(p->per_gb_month));
    check_price(p->per_gb_month);
    check_price(p->per_1000_puts);
    check_price(p->per_1000_gets);
    check_price(p->egress_per_gb);
    cli_money money = cli_money_text(p, cli_price_stored(p, UINT64_MAX));
    require(memchr(money.text, 0, sizeof(money.text)) != NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    cli_prices *p;
    ckd_error err = {0};
    if (cli_prices_read(&p, fuzz_file(data, size), &err) == CKD_OK) {
        check(p);
        cli_prices_free(p);
    } else {
        require(p == NULL && err.status != CKD_OK && err.message[0]);
    }
    return 0;
}
