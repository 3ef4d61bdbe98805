/* What storage costs, from a table that the user has written: a small JSON file. docs/cli.md describes it. */
#ifndef CLI_PRICES_H
#define CLI_PRICES_H

#include "cli/output/errors.h"

typedef struct cli_prices {
    char *name, *date, *currency;
    double per_gb_month, per_1000_puts, per_1000_gets, egress_per_gb; /* a GB has 10^9 bytes; NaN: not said */
} cli_prices;

/* Errors: NOT_FOUND, IO, INVALID (with file and field), NOMEM. Release with cli_prices_free, which accepts NULL. */
ckd_status cli_prices_read(cli_prices **out, const char *path, ckd_error *err);
void cli_prices_free(cli_prices *prices);

/* What bytes cost in a month. */
double cli_price_stored(const cli_prices *prices, uint64_t bytes);

/* "12.34 USD"; "-" for NaN. */
typedef struct cli_money {
    char text[64];
} cli_money;
cli_money cli_money_text(const cli_prices *prices, double amount);

#endif
