// The page's plain script, loosely.
declare const uPlot: any;
