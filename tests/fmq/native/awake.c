/* The rule in spin.h for a test in Python: reads steps from stdin ("b" or "w NANOSECONDS SLEPT"), and prints the budget, or whether brisk. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "spin.h"

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    struct spin_policy end;
    spin_begin(&end, atoi(arguments[2]) ? atoll(arguments[1]) : 0);
    char step;
    long long ns;
    int slept;
    while (scanf(" %c", &step) == 1) {
        if (step == 'b')
            printf("%lld\n", (long long)spin_budget_ns(&end));
        else if (scanf("%lld %d", &ns, &slept) == 2) {
            spin_waited(&end, ns, slept);
            printf("%d\n", end.brisk);
        } else
            return 1;
    }
    return 0;
}
