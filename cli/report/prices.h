/* Storage prices from a small JSON file written by the user. docs/cli.md describes it. */
#ifndef CLI_PRICES_H
#define CLI_PRICES_H

#include "cli/output/output.h"

typedef struct cli_prices {
    char *name, *date, *currency;
    /* a GB has 10^9 bytes; NaN: not given */
    double per_gb_month, per_1000_puts, per_1000_gets, egress_per_gb;
} cli_prices;

/*
 * Reads prices. Release with cli_prices_free, which accepts NULL. Errors: NOT_FOUND, IO, INVALID (with file and field),
 * NOMEM.
 */
ckd_status cli_prices_read(cli_prices **out, const char *path, ckd_error *err);
void cli_prices_free(cli_prices *prices);

/* Returns the price that a page assumes if no table was given; of storage only. */
const cli_prices *cli_prices_assumed(void);

/* Returns the monthly cost of stored bytes. */
double cli_price_stored(const cli_prices *prices, uint64_t bytes);

/* "12.34 USD"; "-" for NaN. */
typedef struct cli_money {
    char text[64];
} cli_money;
cli_money cli_money_text(const cli_prices *prices, double amount);

#endif
